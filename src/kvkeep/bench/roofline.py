"""Roofline of a decode step on this machine: the model's linear layers once, and reading the kept cache once.

Both are measured, the fastest of a few runs, and a step needs both, so their sum bounds its time from below. It is an
estimate: other processes may slow the measurement, and a KV cache that fits into the processor's caches is read faster
than a large copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.bench.timing import as_cuda_graph, min_seconds

COPIED = {"cpu": 1 << 28, "cuda": 1 << 31}  # bytes, far more than a processor's caches hold
TIMES = 8


@dataclass(frozen=True)
class Roofline:
    """Of one model on one machine."""

    linear_s: dict[int, float]  # by batch size: all linear layers once
    bytes_per_s: float  # memory bandwidth

    @classmethod
    def measure(cls, model: Any, batches: Sequence[int]) -> Roofline:
        with torch.inference_mode():
            return cls({batch: _linear(model, batch) for batch in batches}, _bandwidth(model.device))

    def step_time(self, batch: int, kv_bytes: int) -> tuple[float, str] | None:
        """kv_bytes: of one sequence. -> seconds of a step at least, and the larger part: weights or cache"""
        if batch not in self.linear_s:
            return None
        weights, cache = self.linear_s[batch], batch * kv_bytes / self.bytes_per_s
        return weights + cache, "weights" if weights >= cache else "cache"


def _linear(model: Any, batch: int) -> float:
    """Seconds of all linear layers, one after the other; in a CUDA graph on a GPU."""
    inputs: list[tuple[nn.Module, Tensor]] = []
    hooks = [
        each.register_forward_pre_hook(lambda layer, given: inputs.append((layer, torch.randn_like(given[0]))))
        for each in model.modules()
        if isinstance(each, nn.Linear)
    ]
    try:
        model(torch.zeros(batch, 1, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()

    def run() -> Tensor:
        return [layer(given) for layer, given in inputs][-1]

    run()
    return min_seconds(model.device, as_cuda_graph(run, model.device) or run, TIMES)


def _bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy on the device, which reads and writes every byte."""
    size = COPIED[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)  # written, so that every page is mapped
    target = torch.ones_like(source)
    return 2 * size / min_seconds(device, lambda: target.copy_(source), TIMES)
