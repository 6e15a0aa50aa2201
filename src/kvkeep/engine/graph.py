"""A forward pass captured once and replayed: launching a model's kernels one by one costs a GPU more than running them.

Where there is no GPU the pass is simply run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor


class Replay:
    """A function of tensors that never move, whose result lies where it lay the first time."""

    def __init__(self, run: Callable[[], Tensor], device: torch.device) -> None:
        self.run = run
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None
        if device.type == "cuda":
            self._capture()

    def __call__(self) -> Tensor:
        if self.graph is None:
            return self.run()
        self.graph.replay()
        assert self.result is not None
        return self.result

    def _capture(self) -> None:
        """Run it beside first, so that everything that is made once is made."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.result = self.run()
            self.graph = graph
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            warnings.warn(f"decoding cannot be captured in a CUDA graph ({why}); it runs as it is.", stacklevel=3)
