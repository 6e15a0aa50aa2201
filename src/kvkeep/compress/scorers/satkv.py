"""Keep outlier keys, independent of queries: SATKV (ProtoKV)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.arguments import Checked, Positive
from kvkeep.compress.attention import outlier_degree
from kvkeep.types import Observation


@dataclass(frozen=True)
class SatKVScorer(Checked):
    kappa: Positive = 5
    additive = False  # some are negative

    def cache_key(self, budget: int) -> int:
        return self.kappa

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return outlier_degree(seen, self.kappa)
