"""What scoring and eviction add to prefill: python benchmarks/scoring.py [--length 8192] [--methods snapkv h2o …]

One prefill for each method; the time spent in the cache and in the rest of the model are measured in the same run, so
the ratio holds whatever the load of the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time

import torch

import kvkeep
from kvkeep.model.load import load, quiet_transformers

CROSSED = ["snapkv+adakv", "snapkv+pyramid", "snapkv+cake", "snapkv+entropy"]


class Timed(kvkeep.Cache):
    """Sums the time spent in attend, without the model's own attention."""

    spent = 0.0

    def attend(self, index, new):
        attention_s = 0.0

        def timed(*args, **kwargs):
            nonlocal attention_s
            start = time.perf_counter()
            result = new.hf_attention(*args, **kwargs)
            attention_s += time.perf_counter() - start
            return result

        start = time.perf_counter()
        result = super().attend(index, dataclasses.replace(new, hf_attention=timed))
        self.spent += time.perf_counter() - start - attention_s
        return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--methods", nargs="*", default=[*kvkeep.methods, *CROSSED])
    options = parser.parse_args()
    quiet_transformers()
    model, _ = load()
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, options.length))
    print(f"| method | prefill of {options.length} tokens, s | scoring and eviction, s | overhead | peak MB so far |")
    print("|---|---|---|---|---|")
    with torch.inference_mode():
        for spec in options.methods:
            cache = Timed(model, spec, options.budget)
            start = time.perf_counter()
            model(ids, past_key_values=cache, logits_to_keep=1)
            prefill_s = time.perf_counter() - start - cache.spent
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            ratio = cache.spent / prefill_s
            print(f"| {spec} | {prefill_s:.1f} | {cache.spent:.2f} | {ratio:.1%} | {peak} |", flush=True)


if __name__ == "__main__":
    main()
