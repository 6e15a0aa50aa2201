"""Keys of small norm attract attention, before any query is known (arXiv:2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.attention import norms
from kvkeep.types import Observation


@dataclass(frozen=True)
class KeyNormScorer:
    signed, one_scale = True, False

    def cache_key(self, budget: int) -> int:
        return 1

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return -norms(seen.keys).float()
