"""What choosing costs on top of reading: python benchmarks/scoring.py [--tokens 8192] [--methods snapkv h2o …]

For each method one prefill; the time spent in our code and in the rest of the model are measured in that same run, so
the ratio holds whatever else the machine does.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time

import torch

import kvkeep
from kvkeep.model.load import hush, load

CROSSED = ["snapkv+adakv", "snapkv+pyramid", "snapkv+cake", "snapkv+entropy"]


class Timed(kvkeep.Cache):
    """A cache that knows how long it kept the model waiting."""

    spent = 0.0

    def attend(self, index, new):
        reading = 0.0

        def stock(*args, **kwargs):
            nonlocal reading
            start = time.perf_counter()
            result = new.stock(*args, **kwargs)
            reading += time.perf_counter() - start
            return result

        start = time.perf_counter()
        result = super().attend(index, dataclasses.replace(new, stock=stock))
        self.spent += time.perf_counter() - start - reading
        return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--methods", nargs="*", default=[*kvkeep.methods, *CROSSED])
    options = parser.parse_args()
    hush()
    model, _ = load()
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, options.tokens))
    print(f"| method | reading {options.tokens} tokens, s | choosing, s | overhead | peak MB so far |")
    print("|---|---|---|---|---|")
    with torch.inference_mode():
        for spec in options.methods:
            cache = Timed(model, spec, options.budget)
            start = time.perf_counter()
            model(ids, past_key_values=cache, logits_to_keep=1)
            reading = time.perf_counter() - start - cache.spent
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(f"| {spec} | {reading:.1f} | {cache.spent:.2f} | {cache.spent / reading:.1%} | {peak} |", flush=True)


if __name__ == "__main__":
    main()
