"""Keep the most recent tokens. An order, not a score: head budgets cannot compare heads with it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.attention import distance_from_end
from kvkeep.types import Observation, Step


@dataclass(frozen=True)
class RecencyScorer:
    has_scores = False
    needs_attention = False
    per_head = True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return -distance_from_end(seen).float()

    def step(self, now: Step, budget: int) -> Tensor:
        return now.token_positions
