"""Attention of the newest queries: SnapKV (arXiv:2404.14469) and, with one query, TOVA (arXiv:2401.06104).

Deviation: attention is averaged over the query heads of a KV head before pooling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvkeep.arguments import Checked, Odd, Positive
from kvkeep.compress.attention import attention_received, distance_from_end, pool
from kvkeep.compress.guard import effective_window
from kvkeep.types import Observation, Step


@dataclass(frozen=True)
class SnapKVScorer(Checked):
    window: Positive = 64
    pool: Odd = 5
    pooling: Literal["avg", "max"] = "avg"
    kept: bool = True  # the window is kept: it shrinks with the budget, and only tokens before it are pooled
    shared: bool = False  # all KV heads of a layer share the average score

    @property
    def per_head(self) -> bool:
        return not self.shared

    def cache_key(self, budget: int) -> int:
        return 1 + (effective_window(self.window, budget) if self.kept else self.window)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = effective_window(self.window, budget) if self.kept else self.window
        scores = attention_received(seen, max(1, window))
        if self.shared:
            scores = scores.mean(0, keepdim=True).expand_as(scores)
        start = window if self.kept else 0
        among = seen.once(("before", start), lambda: distance_from_end(seen) >= start)
        return pool(scores, among, self.pool, self.pooling)


@dataclass(frozen=True)
class TovaScorer(SnapKVScorer):
    """One query, one selection per layer: cheap enough for every step."""

    window: Positive = 1
    pool: Odd = 1
    kept: bool = False
    shared: bool = True
    needs_attention = True

    def step(self, now: Step, budget: int) -> Tensor:
        scores = now.probs.mean((1, 2), keepdim=True)[:, 0]
        return scores.expand(-1, now.probs.shape[1], -1)
