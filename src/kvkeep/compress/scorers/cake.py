"""The window's mean attention plus its variance: tokens of varying attention score higher (CAKE, arXiv:2503.12491).

Deviation: averaged over the query heads of a group before pooling; padding is not pooled.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.arguments import Amount, Checked, Odd, Positive
from kvkeep.compress.attention import attention, distance_from_end, mean_and_variance, pool
from kvkeep.compress.guard import effective_window
from kvkeep.types import Observation


@dataclass(frozen=True)
class CakeScorer(Checked):
    window: Positive = 32
    gamma: Amount = 200.0
    pool: Odd = 5

    def cache_key(self, budget: int) -> int:
        return 1 + effective_window(self.window, budget)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = effective_window(self.window, budget)
        mean, variance = mean_and_variance(attention(seen, max(1, window)))
        return pool((mean + self.gamma * variance).mean(1), distance_from_end(seen) >= window, self.pool)
