"""Seconds and bytes of what a model does, once everything it started is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kvkeep.engine.cuda_graph import captured
from kvkeep.engine.progress import now


def fastest(device: torch.device, run: Callable[[], Any], times: int) -> float:
    """Seconds of the quickest of so many runs."""
    spent = []
    for _ in range(times):
        began = now(device)
        run()
        spent.append(now(device) - began)
    return min(spent)


def paced(step: Callable[[], Any], times: int) -> float:
    """Median seconds from one step's return to the next: a step may hand out what the last one began."""
    ends = [time.perf_counter()]
    for _ in range(times):
        step()
        ends.append(time.perf_counter())
    return median(after - before for before, after in zip(ends, ends[1:], strict=False))


def replayed(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor] | None:
    """The same from a CUDA graph, or None where that cannot be. Unlike a Replay it compiles nothing of the model."""
    if device.type != "cuda":
        return None
    try:
        graph, result = captured(run)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def read(
    model: Any, ids: Tensor, make: Callable[[], Any], piece: int | None, how: Any = nullcontext
) -> tuple[Any, float, int]:
    """-> a cache that has read the ids [n], how long that took, and the most memory it took beyond what was held

    how: a context that changes the way a model reads
    """
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    cache, began = make(), now(model.device)
    size = piece or len(ids)
    with torch.inference_mode(), how():
        for start in range(0, len(ids), size):
            model(ids[None, start : start + size], past_key_values=cache, logits_to_keep=1)
    return cache, now(model.device) - began, torch.cuda.max_memory_allocated() - held if cuda else 0
