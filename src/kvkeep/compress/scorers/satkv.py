"""Keep the keys that stand out, whoever asks: SATKV. Needs no query at all."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.outliers import outlier_degree
from kvkeep.errors import BadParameter
from kvkeep.types import Observation


@dataclass(frozen=True)
class Outliers:
    kappa: int = 5

    def __post_init__(self) -> None:
        if self.kappa < 1:
            raise BadParameter(f"kappa={self.kappa}: a key needs at least one neighbour to be unlike; use 1 or more.")

    def matters(self, budget: int) -> int:
        """All that scores depend on of a budget: nothing."""
        return self.kappa

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return outlier_degree(seen, self.kappa)
