"""Seconds and bytes of model calls; the device is synchronized before the clock is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kvkeep.engine.progress import now
from kvkeep.model.cuda_graph import capture_graph


def min_seconds(device: torch.device, run: Callable[[], Any], times: int) -> float:
    """Of `times` runs."""
    spent = []
    for _ in range(times):
        began = now(device)
        run()
        spent.append(now(device) - began)
    return min(spent)


def median_interval(step: Callable[[], Any], times: int) -> float:
    """Median seconds from one step's return to the next: a step may return the tokens of the step before."""
    ends = [time.perf_counter()]
    for _ in range(times):
        step()
        ends.append(time.perf_counter())
    return median(after - before for before, after in zip(ends, ends[1:], strict=False))


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
    model: Any, ids: Tensor, make: Callable[[], Any], prefill_chunk_size: int | None, how: Any = nullcontext
) -> tuple[Any, float, int]:
    """Prefill ids [n]. -> the cache, seconds, and peak bytes of device memory beyond those allocated before

    how: a context manager around the forward passes
    """
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    cache, began = make(), now(model.device)
    size = prefill_chunk_size or len(ids)
    with torch.inference_mode(), how():
        for start in range(0, len(ids), size):
            model(ids[None, start : start + size], past_key_values=cache, logits_to_keep=1)
    return cache, now(model.device) - began, torch.cuda.max_memory_allocated() - held if cuda else 0
