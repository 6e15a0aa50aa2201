"""Another scorer's scores, weighted by the size of each token's value: what is large when attended to counts more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.attention import real, value_sizes
from kvkeep.compress.pooling import check_pool, pool
from kvkeep.errors import BadParameter
from kvkeep.types import Observation


@dataclass(frozen=True)
class ByValue:
    """power 1: squared norms, as AhaKV; 0.5: norms."""

    scorer: Callable[[Observation, int], Tensor]
    power: float = 1.0
    pool: int = 5

    def __post_init__(self) -> None:
        check_pool("value_pool", self.pool)
        if getattr(self.scorer, "signed", False):
            raise BadParameter("scores below zero cannot be weighted by values; use protokv:votes=softmax.")
        if self.power <= 0:
            raise BadParameter(f"power={self.power} does not favour large values; use more than 0.")

    def matters(self, budget: int) -> int | None:
        """As for the scorer behind it."""
        behind = getattr(self.scorer, "matters", None)
        return behind(budget) if behind else None

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        tokens = real(seen)
        size = pool(value_sizes(seen) * tokens, tokens, self.pool) * tokens
        return self.scorer(seen, budget) * (size / size.amax(1, keepdim=True).clamp_min(1e-30)) ** self.power
