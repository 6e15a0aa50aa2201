"""What others do with the whole cache: transformers as it is, and its static cache in a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.bench.timing import paced, replayed
from kvkeep.model.hf_layers import static_cache, stock_cache

SPARE = 4  # tokens written beside those that are timed
ALIGNED = 16  # masks of such lengths are taken as they are by the fast attention kernels


@dataclass(frozen=True)
class Eager:
    """A cache that grows by a token at a time, every kernel launched by itself."""

    model: Any
    by: ClassVar[str] = "transformers"
    method: ClassVar[str] = "full"
    budget: ClassVar[None] = None

    def make(self, tokens: int) -> Any:
        return stock_cache(self.model)

    def nbytes(self, cache: Any) -> int:
        return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))

    def step_seconds(self, cache: Any, context: int, rows: int, steps: int) -> tuple[float, str]:
        token = torch.zeros(rows, 1, dtype=torch.int64, device=self.model.device)

        def step() -> None:
            with torch.inference_mode():
                self.model(token, past_key_values=cache).logits.argmax(-1).tolist()

        try:
            if rows > 1:
                cache.batch_repeat_interleave(rows)
            step()
            return paced(step, steps), ""
        finally:  # the next batch starts from what was read, whatever became of this one
            for layer in cache.layers:
                layer.keys, layer.values = (t[:1, :, :context].clone() for t in (layer.keys, layer.values))


@dataclass(frozen=True)
class Static:
    """A cache of fixed size, so that a step can be captured; it attends to its whole length under a mask."""

    model: Any
    by: ClassVar[str] = "static"
    method: ClassVar[str] = "full"
    budget: ClassVar[None] = None

    def make(self, tokens: int) -> Any:
        return static_cache(self.model, -(-tokens // ALIGNED) * ALIGNED)

    def nbytes(self, cache: Any) -> int:
        return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))

    def step_seconds(self, cache: Any, context: int, rows: int, steps: int) -> tuple[float, str]:
        step = StaticSteps(self.model, self._copies(cache, context, rows, steps), context, rows)
        step()
        missed = self.model.device.type == "cuda" and step.graph is None
        return paced(lambda: (step(), step.tokens.tolist()), steps), "not captured in a graph" if missed else ""

    def _copies(self, cache: Any, context: int, rows: int, steps: int) -> Any:
        """A cache of so many sequences, all alike."""
        made = self.make(context + steps + SPARE)
        with torch.inference_mode():
            for mine, theirs in zip(made.layers, cache.layers, strict=True):
                mine.update(*(t[:, :, :context].expand(rows, -1, -1, -1) for t in (theirs.keys, theirs.values)))
        return made


class StaticSteps:
    """One token for every row at each call, the likeliest after the last.

    The cache counts its tokens on the device, and transformers takes positions and mask from that count, so a replayed
    pass moves on by itself.
    """

    def __init__(self, model: Any, cache: Any, context: int, rows: int) -> None:
        self.model, self.cache = model, cache
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
        with torch.inference_mode():
            self.graph = replayed(self._run, model.device)
            self.tokens.zero_()
            for layer in cache.layers:
                layer.cumulative_length.fill_(context)  # a capture rehearses

    def __call__(self) -> Tensor:
        """-> logits [rows, vocabulary]"""
        with torch.inference_mode():
            return self.graph() if self.graph else self._run()

    def _run(self) -> Tensor:
        logits = self.model(self.tokens, past_key_values=self.cache).logits[:, -1]
        torch.argmax(logits, -1, keepdim=True, out=self.tokens)
        return logits
