"""The newest queries vote with their attention: SnapKV (arXiv:2404.14469) and, with one voter, TOVA (arXiv:2401.06104).

Deviation: votes of the query heads that share a key head are averaged before pooling.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.attention import from_end, received
from kvkeep.compress.guard import check_window, shrunk
from kvkeep.compress.pooling import pool
from kvkeep.errors import BadParameter
from kvkeep.types import Observation, Step


@dataclass(frozen=True)
class Votes:
    window: int = 64
    pool: int = 5
    pooling: str = "avg"
    kept: bool = True  # the window stays: it shrinks with the budget, and only tokens before it are pooled
    one_choice: bool = False  # all key heads of a layer share the average vote

    def __post_init__(self) -> None:
        check_window(self.window, self.pool)
        if self.pooling not in ("avg", "max"):
            raise BadParameter(f"pooling='{self.pooling}' is not known; use 'avg' or 'max'.")

    def matters(self, budget: int) -> int:
        """All that scores depend on of a budget: the window. Never 0."""
        return 1 + (shrunk(self.window, budget) if self.kept else self.window)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = shrunk(self.window, budget) if self.kept else self.window
        votes = received(seen, max(1, window))
        if self.one_choice:
            votes = votes.mean(0, keepdim=True).expand_as(votes)
        return pool(votes, from_end(seen) >= (window if self.kept else 0), self.pool, self.pooling)


@dataclass(frozen=True)
class LastVote(Votes):
    """One voter, one choice per layer: cheap enough for every step."""

    window: int = 1
    pool: int = 1
    kept: bool = False
    one_choice: bool = True
    looks = True

    def step(self, now: Step, budget: int) -> Tensor:
        votes = now.chances.mean((1, 2), keepdim=True)[:, 0]
        return votes.expand(-1, now.chances.shape[1], -1)
