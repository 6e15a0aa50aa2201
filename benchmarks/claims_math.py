"""Answers longer than the budget, MATH-500: python benchmarks/claims_math.py --data DIR --out DIR/math --budget 256

Writes rows that `claims_scores.py --tables` reads. Methods with a schedule of their own evict at every step, the others
every 128 (ProtoKV, appendix O). Prompts are decoded in padded batches by transformers' `generate`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from process_pool import map_in_processes

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.evaluate import suite
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.sample import Sample
from kvkeep.model.chat import eos_token_ids
from kvkeep.model.load import load, quiet_transformers

METHODS = (
    "full", "streamingllm", "h2o", "tova", "ahakv", "ahakv:recent=64", "snapkv:window=32", "chunkkv", "protokv",
    "rkv", "keep_prompt_random",
)  # fmt: skip
BUFFER = 128
Item = tuple[str, list[Sample]]


def answer(model: Any, tokenizer: Any, budget: int, tokens: int, item: Item) -> Iterator[dict[str, Any]]:
    """Rows of one method and a batch of problems."""
    spec, samples = item
    chats = [[{"role": "user", "content": sample.question}] for sample in samples]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    method = parse(spec)
    schedule = BUFFER if method.scorer and method.schedule.every is None else None
    cache = kvkeep.Cache(model, spec, budget, schedule=schedule)
    with torch.inference_mode():
        out = model.generate(
            **inputs.to(model.device), past_key_values=cache, max_new_tokens=tokens, do_sample=False,
            eos_token_id=sorted(eos_token_ids(model, tokenizer)), pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    said = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    for sample, text in zip(samples, said, strict=True):
        score = METRICS[sample.metric](text, sample.references[0], **sample.extra)
        yield {
            "task": sample.task, "id": sample.id, "protocol": "aware", "method": spec,
            "budget": None if spec == "full" else budget, "metric": sample.metric, "score": score, "answer": text,
        }  # fmt: skip


def make(options: argparse.Namespace) -> Any:
    quiet_transformers()
    model, tokenizer = load(options.model, device=options.device, dtype=options.dtype)
    return partial(answer, model, tokenizer, options.budget, options.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    samples, _ = suite.load(["math500"], None, suite.Sources(data=options.data, limit=options.problems))
    batches = [samples[start : start + options.batch] for start in range(0, len(samples), options.batch)]
    items = [(method, batch) for batch, method in product(batches, options.methods)]
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "rows.jsonl").open("w") as file:
        for rows in map_in_processes(partial(make, options), options.workers)(items):
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            print(rows[0]["method"], sum(row["score"] for row in rows), "of", len(rows), flush=True)


if __name__ == "__main__":
    sys.exit(main())
