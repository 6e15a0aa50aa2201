"""Decode steps over ragged and equal heads, interleaved in one run: python benchmarks/decode.py [--budget 512]

Ratios only: absolute times depend on the machine and on what else it does.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import kvkeep
from kvkeep.model.load import hush, load


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    hush()
    model, _ = load()
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, options.tokens))
    specs = [(name, "prompt") for name in ("snapkv", "snapkv+adakv", "snapkv+pyramid", "snapkv+adakv+pyramid", "full")]
    specs += [(name, "step") for name in ("streamingllm", "lm_infinite", "tova", "h2o", "ahakv")]
    specs += [(name, "buffer") for name in ("snapkv", "protokv", "snapkv+adakv")]
    caches = {spec: kvkeep.Cache(model, spec[0], options.budget, schedule=spec[1]) for spec in specs}
    times: dict[tuple[str, str], list[float]] = {spec: [] for spec in specs}
    with torch.inference_mode():
        for cache in caches.values():
            model(ids, past_key_values=cache, logits_to_keep=1)
        for step in range(options.steps):
            for spec, cache in caches.items():
                start = time.perf_counter()
                model(ids[:, step : step + 1], past_key_values=cache)
                times[spec].append(time.perf_counter() - start)
    print(
        f"{options.tokens} tokens, budget {options.budget}, {options.steps} steps, interleaved; ratios to snapkv/prompt"
    )
    base = times["snapkv", "prompt"]
    for spec in specs:
        middle = statistics.median(mine / theirs for mine, theirs in zip(times[spec], base, strict=True))
        mean = sum(times[spec]) / sum(base)
        print(f"{'/'.join(spec):30} median {middle:5.3f}  mean {mean:5.3f}   {caches[spec].nbytes / 1e6:6.1f} MB")


if __name__ == "__main__":
    main()
