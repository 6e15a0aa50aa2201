"""What scoring and eviction add to prefill: python benchmarks/scoring.py [--length 8192] [--methods snapkv h2o …]

One prefill for each method, after one that does not count; the time spent in the cache and in the rest of the model are
measured in the same run, so the ratio holds whatever the load of the machine. A GPU is synchronized before every
reading of the clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
from typing import Any

import torch
from torch import Tensor

import kvkeep
from kvkeep.engine.progress import now
from kvkeep.model.load import load, quiet_transformers

CROSSED = ["snapkv+adakv", "snapkv+pyramid", "snapkv+cake", "snapkv+entropy"]


class Timed(kvkeep.Cache):
    """Sums the time spent in attend, without the model's own attention."""

    spent = 0.0

    def attend(self, index, new):
        attention_s = 0.0

        def timed(*args, **kwargs):
            nonlocal attention_s
            start = now(device)
            result = new.hf_attention(*args, **kwargs)
            attention_s += now(device) - start
            return result

        device = new.query.device
        start = now(device)
        result = super().attend(index, dataclasses.replace(new, hf_attention=timed))
        self.spent += now(device) - start - attention_s
        return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--methods", nargs="*", default=[*kvkeep.methods, *CROSSED])
    parser.add_argument("--model")
    parser.add_argument("--device")
    options = parser.parse_args()
    quiet_transformers()
    model, _ = load(options.model, device=options.device)
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, options.length), device=model.device)
    print(f"| method | prefill of {options.length} tokens, ms | scoring and eviction, ms | overhead | peak MB so far |")
    print("|---|---|---|---|---|")
    with torch.inference_mode():
        model(ids[:, :512], past_key_values=Timed(model, "full"), logits_to_keep=1)
        for spec in options.methods:
            prefill_s, spent = measure(model, ids, spec, options.budget)
            print(
                f"| {spec} | {1000 * prefill_s:.1f} | {1000 * spent:.2f} | {spent / prefill_s:.1%} | "
                f"{peak_mb(model.device)} |",
                flush=True,
            )


def measure(model: Any, ids: Tensor, spec: str, budget: int) -> tuple[float, float]:
    """-> seconds of the model, and of scoring and eviction"""
    cache = Timed(model, spec, budget)
    start = now(model.device)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return now(model.device) - start - cache.spent, cache.spent


def peak_mb(device: torch.device) -> int:
    """The most memory so far: of a GPU what torch allocated there, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) // 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
