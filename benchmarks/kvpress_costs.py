"""What kvpress costs, in the rows of `kvkeep bench --also FILE`: python benchmarks/kvpress_costs.py --out kvpress.json

kvpress 0.5 wants transformers below 5.3 and kvkeep 5.10 or later, so this runs in an environment of its own
(pip install torch==2.13.0, then kvpress) on the same machine, and imports nothing of kvkeep. Prompts, steps and
figures are those of `kvkeep bench`. Ratios are to the uncompressed model in this very run, the row named "full".
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kvpress import AdaKVPress, ChunkKVPress, PyramidKVPress, SnapKVPress, StreamingLLMPress, TOVAPress
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

PRESSES = {
    "snapkv": SnapKVPress,
    "tova": TOVAPress,
    "streamingllm": StreamingLLMPress,
    "pyramidkv": PyramidKVPress,
    "chunkkv": lambda compression_ratio: ChunkKVPress(SnapKVPress(compression_ratio)),
    "snapkv+adakv": lambda compression_ratio: AdaKVPress(SnapKVPress(compression_ratio)),
}  # h2o is left out: ObservedAttentionPress needs all attention weights, which only eager attention has
MASKED = "keys are masked, not freed"


def main() -> None:
    options = _options()
    disable_progress_bar()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    rows: list[dict[str, Any]] = []
    for context in options.length:
        ids = torch.arange(context, device=device)[None] * 7919 % model.config.vocab_size
        base: dict[int, dict[str, Any]] = {}
        for method, budget in [("full", None), *product(options.methods, options.budget)]:
            for row in measured(model, method, budget, ids, options):
                plain = base.setdefault(row["batch"], row)
                for figure in ("prefill", "step"):
                    mine, theirs = row[f"{figure}_s"], plain[f"{figure}_s"]
                    row[f"{figure}_ratio"] = None if mine is None or theirs is None else mine / theirs
                rows.append(row)
                print(json.dumps(row), flush=True)
    Path(options.out).write_text(json.dumps(rows, indent=1) + "\n")


@torch.inference_mode()
def measured(model: Any, method: str, budget: float | None, ids: torch.Tensor, options: Any) -> Any:
    """Prefill one sequence under a press, then decode batches of copies of it; a row for each batch."""
    context, cuda = ids.shape[1], model.device.type == "cuda"
    press = None
    if budget is not None:
        kept = min(budget if budget >= 1 else budget * context, context)
        press = PRESSES[method](compression_ratio=1 - kept / context)
    prefill(model, press, ids[:, :512])
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    began = now(model)
    cache = prefill(model, press, ids)
    seconds = now(model) - began
    peak = torch.cuda.max_memory_allocated() - held if cuda else 0
    lengths = [layer.keys.shape[2] for layer in cache.layers]
    size = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    masked = isinstance(press, AdaKVPress)
    for batch in options.batch:
        if masked and batch > 1:
            step, note = None, f"{MASKED}: masks of one sequence do not fit a batch of copies"
        else:
            step, note = steps(model, cache, lengths, context, batch, options.steps), MASKED if masked else ""
        yield {
            "by": "kvpress", "method": method, "budget": budget, "context": context, "batch": batch,
            "prefill_s": seconds, "step_s": step, "tokens_per_s": None if step is None else batch / step,
            "kv_bytes": size, "peak_bytes": peak, "note": note,
        }  # fmt: skip


def prefill(model: Any, press: Any, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()
    with press(model) if press else nullcontext():
        model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def steps(model: Any, cache: Any, lengths: list[int], context: int, rows: int, count: int) -> float:
    """Median seconds of a decode step, positions counted from the prompt's end as kvpress' pipeline does."""
    token = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
    spent = []
    if rows > 1:
        cache.batch_repeat_interleave(rows)
    for position in range(context, context + count + 1):
        began = now(model)
        at = torch.full((rows, 1), position, device=model.device)
        model(token, past_key_values=cache, position_ids=at).logits.argmax(-1).tolist()
        spent.append(now(model) - began)
    for layer, length in zip(cache.layers, lengths, strict=True):
        layer.keys, layer.values = (t[:1, :, :length].clone() for t in (layer.keys, layer.values))
    return median(spent[1:])


def now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _options() -> Any:
    def several(kind: Any) -> Any:
        return lambda text: [kind(part) for part in text.split(",")]

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(Path.home() / ".cache/kvkeep/models/smollm2-135m-instruct"))
    parser.add_argument("--methods", type=several(str), default=list(PRESSES))
    parser.add_argument("--budget", type=several(float), default=[256])
    parser.add_argument("--length", type=several(int), default=[2048])
    parser.add_argument("--batch", type=several(int), default=[1])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", default="kvpress.json")
    options = parser.parse_args()
    options.budget = [int(each) if each >= 1 else each for each in options.budget]
    if unknown := [each for each in options.methods if each not in PRESSES]:
        parser.error(f"kvpress has no '{unknown[0]}' here; known: {', '.join(PRESSES)}")
    return options


if __name__ == "__main__":
    main()
