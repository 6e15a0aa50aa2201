"""A forward pass captured once and replayed: launching a model's kernels one by one costs a GPU more than running them.

Where there is no GPU the pass is simply run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import where
from kvkeep.model.compile import fused

REHEARSALS = 2  # passes before one is captured, so that everything that is made once is made
LONGEST = 2 * REHEARSALS  # passes of a capture that fails at first


class Replay:
    """A function of tensors that never move, whose result lies where it lay the first time."""

    def __init__(self, run: Callable[[], Tensor], model: Any) -> None:
        self.run, self.device = run, model.device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None
        if model.device.type == "cuda" and not self._try(fused(model), "with its small operations compiled"):
            self._try(nullcontext(), "in a CUDA graph")

    def __call__(self) -> Tensor:
        if self.graph is None:
            return self.run()
        self.graph.replay()
        assert self.result is not None
        return self.result

    def _try(self, setting: Any, how: str) -> bool:
        try:
            with setting:
                self._capture()
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            warnings.warn(f"decoding cannot run {how} ({why}); it runs without.", stacklevel=4)
        return self.graph is not None

    def _capture(self) -> None:
        with where(self.device):
            self.graph, self.result = captured(self.run)


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of what a function does on the current device, and where its result will lie."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(REHEARSALS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # torch's own is on the device that captured first
        result = run()
    return graph, result
