"""Uncompressed baselines: transformers' DynamicCache, and its StaticCache in a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.bench.timing import as_cuda_graph, median_interval
from kvkeep.model.hf_layers import dynamic_cache, static_cache

SPARE = 4  # decode steps beside those that are timed
ALIGNED = 16  # fast attention kernels want masks of such lengths


@dataclass(frozen=True)
class Uncompressed:
    model: Any
    method: ClassVar[str] = "full"
    budget: ClassVar[None] = None

    def nbytes(self, cache: Any) -> int:
        return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


class Eager(Uncompressed):
    """A cache that grows by one token per step, without a CUDA graph."""

    by: ClassVar[str] = "transformers"

    def make(self, tokens: int) -> Any:
        return dynamic_cache(self.model)

    def step_seconds(self, cache: Any, context: int, rows: int, steps: int) -> tuple[float, str]:
        token = torch.zeros(rows, 1, dtype=torch.int64, device=self.model.device)

        def step() -> None:
            with torch.inference_mode():
                self.model(token, past_key_values=cache).logits.argmax(-1).tolist()

        try:
            if rows > 1:
                cache.batch_repeat_interleave(rows)
            step()
            return median_interval(step, steps), ""
        finally:  # back to the prefilled cache, even after an error
            for layer in cache.layers:
                layer.keys, layer.values = (t[:1, :, :context].clone() for t in (layer.keys, layer.values))


class Static(Uncompressed):
    """A cache of fixed size, so that a step can be captured; attention covers its whole length under a mask."""

    by: ClassVar[str] = "static"

    def make(self, tokens: int) -> Any:
        return static_cache(self.model, -(-tokens // ALIGNED) * ALIGNED)

    def step_seconds(self, cache: Any, context: int, rows: int, steps: int) -> tuple[float, str]:
        step = StaticSteps(self.model, self._copies(cache, context, rows, steps), context, rows)
        step()
        not_captured = self.model.device.type == "cuda" and step.graph is None
        note = "not captured in a graph" if not_captured else ""
        return median_interval(lambda: (step(), step.tokens.tolist()), steps), note

    def _copies(self, cache: Any, context: int, rows: int, steps: int) -> Any:
        """A cache of `rows` copies of the sequence."""
        made = self.make(context + steps + SPARE)
        with torch.inference_mode():
            for mine, theirs in zip(made.layers, cache.layers, strict=True):
                mine.update(*(t[:, :, :context].expand(rows, -1, -1, -1) for t in (theirs.keys, theirs.values)))
        return made


class StaticSteps:
    """Every call decodes one token of every row, greedily.

    The cache counts its tokens on the device, and transformers takes positions and mask from that count, so a replayed
    graph advances by itself.
    """

    def __init__(self, model: Any, cache: Any, context: int, rows: int) -> None:
        self.model, self.cache = model, cache
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
        with torch.inference_mode():
            self.graph = as_cuda_graph(self._run, model.device)
            self.tokens.zero_()
            for layer in cache.layers:
                layer.cumulative_length.fill_(context)  # the capture has run some steps

    def __call__(self) -> Tensor:
        """-> logits [rows, vocabulary]"""
        with torch.inference_mode():
            return self.graph() if self.graph else self._run()

    def _run(self) -> Tensor:
        logits = self.model(self.tokens, past_key_values=self.cache).logits[:, -1]
        torch.argmax(logits, -1, keepdim=True, out=self.tokens)
        return logits
