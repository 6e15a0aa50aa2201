"""Another scorer's scores, weighted by the norm of each token's value."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import AboveZero, Checked, Odd
from kvkeep.compress.attention import squared_value_norms, token_mask
from kvkeep.compress.budget.coverage import CERTAIN
from kvkeep.compress.protocols import Scorer, ScorerTraits
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.scoring import pool
from kvkeep.types import Observation


@dataclass(frozen=True)
class ValueNormScorer(Checked):
    """power 1: squared norms, as AhaKV; 0.5: norms."""

    scorer: Scorer
    power: AboveZero = 1.0
    pool: Odd = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if ScorerTraits.of(self.scorer).signed:
            raise BadParameter("negative scores cannot be weighted by values (protokv: use votes=softmax).")

    @property
    def per_head(self) -> bool:
        return ScorerTraits.one(self.scorer, "per_head")

    @property
    def additive(self) -> bool:
        return ScorerTraits.one(self.scorer, "additive")

    def cache_key(self, budget: int) -> Hashable:
        return ScorerTraits.one(self.scorer, "cache_key")(budget)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        tokens = token_mask(seen)
        norms = squared_value_norms(seen)
        norms = pool(norms * tokens, tokens, self.pool) * tokens if seen.is_padded else pool(norms, tokens, self.pool)
        relative = norms / norms.amax(1, keepdim=True).clamp_min(1e-30)
        scores = self.scorer(seen, budget)
        weighted = scores * (relative if self.power == 1 else relative**self.power)
        return torch.where(scores < CERTAIN, weighted, scores)  # those are kept whatever they hold
