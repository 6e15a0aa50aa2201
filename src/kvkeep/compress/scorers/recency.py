"""Newer is better. There is no score here, only an order, so no allocator can compare heads with it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.attention import from_end
from kvkeep.types import Observation, Step


@dataclass(frozen=True)
class Recency:
    scores = False
    looks = False  # attention does not matter

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return -from_end(seen).float()

    def step(self, now: Step, budget: int) -> Tensor:
        return now.positions
