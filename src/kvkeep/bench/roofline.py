"""What a decode step cannot be faster than on this machine: the model's linear layers, and reading what is kept.

Both are measured, the quickest of a few times, and both must be paid by every token, so their sum is the floor of a
step. It is this machine's at that moment and not a law: others may have been at work then, and a cache that fits into
the processor's own caches is read faster than a large copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.bench.timing import fastest, replayed

COPIED = {"cpu": 1 << 28, "cuda": 1 << 31}  # bytes, far more than a processor's caches hold
TIMES = 8


@dataclass(frozen=True)
class Floors:
    """Of one model on one machine."""

    linear_s: dict[int, float]  # by sequences written at a time: all linear layers once
    bytes_per_s: float  # read or written

    @classmethod
    def measured(cls, model: Any, batches: Sequence[int]) -> Floors:
        with torch.inference_mode():
            return cls({batch: _linear(model, batch) for batch in batches}, _bandwidth(model.device))

    def under(self, batch: int, kv_bytes: int) -> tuple[float, str] | None:
        """-> seconds of a step of so many sequences that keep so much each, and the larger part: weights or cache"""
        if batch not in self.linear_s:
            return None
        weights, cache = self.linear_s[batch], batch * kv_bytes / self.bytes_per_s
        return weights + cache, "weights" if weights >= cache else "cache"


def _linear(model: Any, batch: int) -> float:
    """Those a token goes through, one after the other; in a graph on a GPU."""
    met: list[tuple[nn.Module, Tensor]] = []
    hooks = [
        each.register_forward_pre_hook(lambda layer, given: met.append((layer, torch.randn_like(given[0]))))
        for each in model.modules()
        if isinstance(each, nn.Linear)
    ]
    try:
        model(torch.zeros(batch, 1, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()

    def run() -> Tensor:
        return [layer(given) for layer, given in met][-1]

    run()
    return fastest(model.device, replayed(run, model.device) or run, TIMES)


def _bandwidth(device: torch.device) -> float:
    """Of a copy from the device to itself, which reads and writes every byte."""
    size = COPIED[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)  # written, so that every page is really there
    target = torch.ones_like(source)
    return 2 * size / fastest(device, lambda: target.copy_(source), TIMES)
