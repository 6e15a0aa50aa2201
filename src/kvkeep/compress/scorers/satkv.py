"""Keep outlier keys, independent of queries: SATKV (ProtoKV)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.outliers import outlier_degree
from kvkeep.errors import BadParameter
from kvkeep.types import Observation


@dataclass(frozen=True)
class SatKVScorer:
    kappa: int = 5
    additive = False  # some are negative

    def __post_init__(self) -> None:
        if self.kappa < 1:
            raise BadParameter(f"kappa={self.kappa}: a key needs a neighbour to compare with; use 1 or more.")

    def cache_key(self, budget: int) -> int:
        return self.kappa

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return outlier_degree(seen, self.kappa)
