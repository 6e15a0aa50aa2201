"""The window's mean attention plus its variance: tokens of varying attention score higher (CAKE, arXiv:2503.12491).

Deviation: averaged over the query heads of a group before pooling; padding is not pooled.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.attention import attention, distance_from_end, mean_and_variance
from kvkeep.compress.guard import check_window, effective_window
from kvkeep.compress.pooling import pool
from kvkeep.errors import BadParameter
from kvkeep.types import Observation


@dataclass(frozen=True)
class CakeScorer:
    window: int = 32
    gamma: float = 200.0
    pool: int = 5

    def __post_init__(self) -> None:
        check_window(self.window, self.pool)
        if self.gamma < 0:
            raise BadParameter(f"gamma={self.gamma} would reward steady attention; use 0 or more.")

    def cache_key(self, budget: int) -> int:
        return 1 + effective_window(self.window, budget)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = effective_window(self.window, budget)
        mean, variance = mean_and_variance(attention(seen, max(1, window)))
        return pool((mean + self.gamma * variance).mean(1), distance_from_end(seen) >= window, self.pool)
