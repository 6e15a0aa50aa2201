"""Seconds and bytes of model calls, and the roofline of a decode step; the device is synchronized before."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.engine.progress import now
from kvkeep.model.cuda_graph import capture_graph

TIMES = 8  # runs of which the fastest counts


def min_seconds(device: torch.device, run: Callable[[], Any]) -> float:
    """Measure the fastest of TIMES runs."""
    return min(timeit.repeat(run, timer=partial(now, device), repeat=TIMES, number=1))


def median_interval(step: Callable[[], Any], times: int) -> float:
    """Median seconds from one step's return to the next: a step may return the tokens of the step before."""
    ends = [time.perf_counter()]
    for _ in range(times):
        step()
        ends.append(time.perf_counter())
    return median(after - before for before, after in pairwise(ends))


def as_cuda_graph(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor] | None:
    """`run` captured in a CUDA graph, None where that fails. Unlike CudaGraphRunner it compiles nothing."""
    if device.type != "cuda":
        return None
    try:
        graph, result = capture_graph(run)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def timed_prefill(
    model: Any, ids: Tensor, make: Callable[[], Any], prefill_chunk_size: int | None, within: Any = nullcontext
) -> tuple[Any, float, int]:
    """Prefill ids [n]. -> the cache, seconds, and peak bytes of device memory beyond those allocated before

    within: a context manager around the forward passes
    """
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    cache, began = make(), now(model.device)
    size = prefill_chunk_size or len(ids)
    with torch.inference_mode(), within():
        for start in range(0, len(ids), size):
            model(ids[None, start : start + size], past_key_values=cache, logits_to_keep=1)
    return cache, now(model.device) - began, torch.cuda.max_memory_allocated() - held if cuda else 0


COPIED = {"cpu": 1 << 28, "cuda": 1 << 31}  # bytes, far more than a processor's caches hold


@dataclass(frozen=True)
class Roofline:
    """The least time of one model's decode step on one machine: its linear layers once, and the kept cache read once.

    Both are measured, the fastest of a few runs, and a step needs both, so their sum bounds its time from below. It is
    an estimate: other processes may slow the measurement, and a KV cache that fits into the processor's caches is read
    faster than a large copy.
    """

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
    return min_seconds(model.device, as_cuda_graph(run, model.device) or run)


def _bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy on the device, which reads and writes every byte."""
    size = COPIED[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)  # written, so that every page is mapped
    target = torch.ones_like(source)
    return 2 * size / min_seconds(device, lambda: target.copy_(source))
