"""The window's mean attention plus its variance: tokens whose attention shifts matter too (CAKE, arXiv:2503.12491).

Deviation: averaged over the query heads of a group before pooling; pooled with real neighbours only.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.attention import attention, from_end, mean_and_variance
from kvkeep.compress.guard import check_window, shrunk
from kvkeep.compress.pooling import pool
from kvkeep.errors import BadParameter
from kvkeep.types import Observation


@dataclass(frozen=True)
class MeanAndVariance:
    window: int = 32
    gamma: float = 200.0
    pool: int = 5

    def __post_init__(self) -> None:
        check_window(self.window, self.pool)
        if self.gamma < 0:
            raise BadParameter(f"gamma={self.gamma} would reward steady attention; use 0 or more.")

    def matters(self, budget: int) -> int:
        """All that scores depend on of a budget: the window. Never 0."""
        return 1 + shrunk(self.window, budget)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = shrunk(self.window, budget)
        steady, moving = mean_and_variance(attention(seen, max(1, window)))
        return pool((steady + self.gamma * moving).mean(1), from_end(seen) >= window, self.pool)
