"""What a decode step costs, all methods interleaved in one run: python benchmarks/decode.py [--budget 512]

`extra` is the median time inside the cache beyond that of one that only appends (snapkv/prompt), in percent of its
step; `again` is the time of one eviction of a buffered cache, divided by the steps until the next. Ratios only:
absolute times depend on the machine and its load. `stock` is transformers' own cache with as many tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import DynamicCache

import kvkeep
from kvkeep.model.load import load, quiet_transformers

PLAIN = ("snapkv", "prompt")


class Timed(kvkeep.Cache):
    """Sums the time spent in attend."""

    spent = 0.0

    def attend(self, *args: Any) -> Any:
        start = time.perf_counter()
        result = super().attend(*args)
        self.spent += time.perf_counter() - start
        return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=260)
    options = parser.parse_args()
    quiet_transformers()
    model, _ = load()
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, options.length))
    specs = [PLAIN] + [(name, "prompt") for name in ("snapkv+adakv", "snapkv+pyramid", "full")]
    specs += [(name, "step") for name in ("streamingllm", "lm_infinite", "tova", "h2o", "ahakv")]
    specs += [(name, "buffer") for name in ("snapkv", "intentkv", "protokv", "snapkv+adakv")]
    caches: dict[tuple[str, str], Any] = {
        spec: Timed(model, spec[0], options.budget, schedule=spec[1]) for spec in specs
    }
    caches["stock", ""] = DynamicCache(config=model.config)
    whole: dict[tuple[str, str], list[float]] = {spec: [] for spec in caches}
    inside: dict[tuple[str, str], list[float]] = {spec: [] for spec in caches}
    with torch.inference_mode():
        for spec, cache in caches.items():
            model(ids[:, : options.budget] if spec[0] == "stock" else ids, past_key_values=cache, logits_to_keep=1)
        for step in range(options.steps):
            for spec, cache in caches.items():
                cache.spent, start = 0.0, time.perf_counter()
                model(ids[:, step : step + 1], past_key_values=cache)
                whole[spec].append(time.perf_counter() - start)
                inside[spec].append(cache.spent)
    print(f"{options.length} tokens, budget {options.budget}, {options.steps} steps, ratios to {'/'.join(PLAIN)}")
    step, base = statistics.median(whole[PLAIN]), statistics.median(inside[PLAIN])
    for spec in caches:
        ratio = statistics.median(mine / theirs for mine, theirs in zip(whole[spec], whole[PLAIN], strict=True))
        row = f"{'/'.join(spec):28} step {ratio:5.3f}"
        if spec[0] != "stock":
            row += f"   extra {(statistics.median(inside[spec]) - base) / step:+6.1%}"
        if spec[1] == "buffer":
            again = statistics.median(inside[spec][127::128]) - statistics.median(inside[spec])
            row += f"   again {again / 128 / step:5.1%}"
        print(row)


if __name__ == "__main__":
    main()
