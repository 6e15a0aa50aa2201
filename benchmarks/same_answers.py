"""Whether a change leaves every answer as it was: all methods on a tiny random model, along the paths that decode.

    python benchmarks/same_answers.py record FILE      before the change
    python benchmarks/same_answers.py compare FILE     after it: what differs, by method and path; exits with 1

The model is in float64, so that two ways to round do not pass for two answers. A record holds the generated ids and a
checksum of the positions that each layer kept; or the error, where a method refuses a path.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvkeep
from kvkeep.errors import KvkeepError

MODIFIED = ["snapkv+adakv", "h2o+values", "snapkv+pyramid", "h2o+adakv", "protokv+recall", "intentkv+adakv"]
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
BUDGET, STEPS = 24, 20
Record = dict[str, Any]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(["<s>", "</s>", *letters])}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE, **ends)


def tiny_model() -> LlamaForCausalLM:
    """Nine layers, more than are evicted from together; heads that attend to something."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=9, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().double()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 20
    return model


def text(length: int, seed: int) -> str:
    letters = torch.randint(97, 123, (length,), generator=torch.Generator().manual_seed(seed))
    return bytes(letters.tolist()).decode()


def kept(cache: kvkeep.Cache) -> int:
    """A checksum of all positions that are kept."""
    return zlib.crc32(json.dumps([cache.kept(layer) for layer in cache.compressed_layers]).encode())


def generated(model: Any, method: str, rows: int, **options: Any) -> Record:
    """`model.generate` with a cache; several rows are padded on the left."""
    lengths = [70, 97, 45][:rows]
    cache = kvkeep.Cache(model, method, BUDGET, tokenizer=byte_tokenizer(), **options)
    ids, mask = torch.ones(rows, max(lengths), dtype=torch.int64), torch.zeros(rows, max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        drawn = torch.randint(2, 258, (length,), generator=torch.Generator().manual_seed(row))
        ids[row, -length:], mask[row, -length:] = drawn, 1
    how = {"do_sample": False, "max_new_tokens": STEPS, "eos_token_id": None, "pad_token_id": 1}
    answer = model.generate(ids, attention_mask=mask, past_key_values=cache, **how)
    return {"ids": answer[:, max(lengths) :].tolist(), "kept": kept(cache)}


def listed(model: Any, method: str, **options: Any) -> Record:
    """A list of prompts, through an engine's batches."""
    engine = kvkeep.Engine(model, byte_tokenizer(), method, BUDGET, **options)
    prompts = [text(length, seed) for seed, length in enumerate((60, 150, 31, 90))]
    return {"texts": engine.generate(prompts, max_new_tokens=STEPS)}


def chatted(model: Any, method: str) -> Record:
    """Two turns: the cache comes back from the pool."""
    engine = kvkeep.Engine(model, byte_tokenizer(), method, BUDGET)
    turns = ["".join(engine.chat(text(length, length), max_new_tokens=STEPS)) for length in (80, 30)]
    return {"texts": turns, "kept": kept(engine.cache)}


PATHS: dict[str, Callable[[Any, str], Record]] = {
    "alone": lambda model, method: generated(model, method, 1),
    "padded": lambda model, method: generated(model, method, 3),
    "step": lambda model, method: generated(model, method, 2, schedule="step"),
    "buffered": lambda model, method: generated(model, method, 2, schedule=8),
    "int8": lambda model, method: generated(model, method, 2, storage="int8"),
    "list": listed,
    "list, step": lambda model, method: listed(model, method, schedule="step"),
    "list, buffered": lambda model, method: listed(model, method, schedule=8),
    "chat": chatted,
}


def records(names: list[str]) -> dict[str, Record]:
    found, model = {}, tiny_model()
    for name in names:
        for path, run in PATHS.items():
            try:
                found[f"{name} | {path}"] = run(model, name)
            except KvkeepError as error:
                found[f"{name} | {path}"] = {"refused": str(error)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--methods", nargs="*", default=[*kvkeep.methods, *MODIFIED])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with torch.no_grad():
        now = records(args.methods)
    if args.what == "record":
        args.file.write_text(json.dumps(now))
        refused = sum("refused" in each for each in now.values())
        print(f"{len(now)} answers of {len(args.methods)} methods, {refused} refused")
        return 0
    before = json.loads(args.file.read_text())
    differ = [name for name, each in now.items() if before.get(name) != each]
    for name in differ:
        print(f"{name}\n  before: {before.get(name)}\n  now:    {now[name]}")
    print(f"{len(now) - len(differ)} of {len(now)} answers are the same")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
