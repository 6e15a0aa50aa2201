"""Runs in every process of tests/model/test_tensor_parallel.py: what a model split over them answers, as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from unittest import mock

import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING, make_llama
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.errors import KvkeepError

IDS = torch.randint(0, 128, (1, 110), generator=torch.Generator().manual_seed(0))
MIXED = ["snapkv+adakv", "snapkv+entropy", "snapkv+prototypes", "tova+values", "h2o+adakv"]
REFUSED = {
    "snapkv+shared": "shares one budget",
    "kvkeep_context": "needs the whole output projection",
    "kvkeep_lookahead": "runs the model again after a prompt",
    "kvzip": "shares one budget",
    "kvzip:layerwise=true": "runs the model again after a prompt",
    "lookahead": "runs the model again after a prompt",
    "kvzip_plus": "needs the whole output projection",
    "snapkv+critical": "needs the whole output projection",
    "intelllm+adakv": "gives KV heads new positions",
}
WORKING = [*(name for name in EVICTING if name not in REFUSED), *MIXED]
SPECS = [*WORKING, *RETRIEVING, *REFUSED]
STORED = [("kvkeep", "int8"), ("snapkv+adakv", "int4")]
SAMPLED = dict(max_new_tokens=4, temperature=0.9, top_k=40, seed=3)
PROMPTS = ["abcdefgh. " * 12 + "what?", "abc", "the quick brown fox " * 7]


def save_model(path: Path) -> None:
    make_llama(vocab_size=258, num_hidden_layers=2, bos_token_id=0, eos_token_id=1).double().save_pretrained(path)


def answers(model) -> dict:
    """By name: tokens of plain transformers, an engine's answers, what is kept, or the refusal."""
    found = {}
    for spec, storage in [*((spec, None) for spec in SPECS), *STORED]:
        name = f"{spec} {storage or ''}".strip()
        try:
            found[name] = [_generate(model, spec, storage), _engine(model, spec, storage)]
        except KvkeepError as refused:
            found[name] = str(refused)
    found["assisted"] = _generate(model, "kvkeep", None, prompt_lookup_num_tokens=3)
    with mock.patch("kvkeep.model.fused.is_faster", lambda model: True):
        found["fused"] = _engine(model, "kvkeep", None)
    return found


def _generate(model, spec: str, storage: str | None, **how) -> list:
    if spec == "sentencekv":  # needs the text
        return []
    cache = kvkeep.Cache(model, spec, 60, storage=storage)
    out = model.generate(IDS, past_key_values=cache, max_new_tokens=4, do_sample=False, **how)
    return [out[0, 110:].tolist(), _all_kept(cache)]


def _all_kept(cache) -> list:
    """Token positions of the kept tokens of every layer and head, those of other processes included."""
    kept = [cache.kept(layer)[0] for layer in range(2)]
    if not torch.distributed.is_initialized():
        return kept
    parts: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, kept)
    return [[head for part in parts for head in part[layer]] for layer in range(2)]


def _engine(model, spec: str, storage: str | None) -> list:
    with kvkeep.Engine(model, tiny_chat.tokenizer(), spec, 70, storage=storage) as engine:
        return [engine.generate(PROMPTS, max_new_tokens=3), "".join(engine.stream(PROMPTS[0], **SAMPLED))]


def refusals(model) -> dict:
    found = {}
    with kvkeep.Engine(model, tiny_chat.tokenizer(), "snapkv", 70) as engine:
        for name, call in {"submit": lambda: engine.submit("a"), "save": lambda: engine.cache.save("nowhere")}.items():
            try:
                call()
            except KvkeepError as refused:
                found[name] = str(refused)
    return found


def main(folder: Path) -> None:
    from transformers.distributed import DistributedConfig

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    split = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=split, dtype=torch.float64)
    rank = torch.distributed.get_rank()
    heads = model.model.layers[0].self_attn.k_proj.weight.to_local().shape[0]
    result = {"heads": heads, "answers": answers(model), "refusals": refusals(model)}
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
