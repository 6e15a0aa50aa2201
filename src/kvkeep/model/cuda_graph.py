"""A forward pass captured in a CUDA graph and replayed: launching kernels one by one takes longer than running them.

Without a GPU, or with a model on several devices, the forward pass is simply run: a graph has memory on one device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import on_device
from kvkeep.model.fused import fused_ops
from kvkeep.model.hf_cache import single_device

WARMUP_PASSES = 2  # before the capture: for one-time compilation and allocation


class CudaGraphRunner:
    """Runs a function of preallocated tensors; its result always lies in the same memory."""

    def __init__(self, run: Callable[[], Tensor], model: Any, warmup_passes: int = WARMUP_PASSES) -> None:
        self.run, self.device, self.warmup_passes = run, single_device(model), warmup_passes
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None
        if self.device and self.device.type == "cuda" and not self._try(fused_ops(model), "with fused operations"):
            self._try(nullcontext(), "in a CUDA graph")

    def __call__(self) -> Tensor:
        if self.graph is None:
            return self.run()
        self.graph.replay()
        assert self.result is not None
        return self.result

    def _try(self, setting: Any, manner: str) -> bool:
        try:
            with setting:
                self._capture()
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            warnings.warn(f"decoding cannot run {manner} ({why}); it runs without.", stacklevel=4)
        return self.graph is not None

    def _capture(self) -> None:
        assert self.device is not None
        with on_device(self.device):
            self.graph, self.result = capture_graph(self.run, self.warmup_passes)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)


def capture_graph(run: Callable[[], Tensor], warmup_passes: int = WARMUP_PASSES) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of a function on the current device, and the tensor of its result."""
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup_passes):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # torch's default stream is on the device of the first capture
        result = run()
    return graph, result
