"""Sharing a layer's budget among its key heads: (scores, forced, lengths, budget, units) -> tokens per key head.

scores [kv_heads, n], -inf beyond a head's length; forced [kv_heads, n], tokens that stay in any case; units: what the
selection keeps or drops whole, None where that is single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.compress.select import Units, best_first, ranked
from kvkeep.errors import BadParameter

INF = float("inf")


@dataclass(frozen=True)
class EqualHeads:
    needs_scores = False

    def __call__(
        self, scores: Tensor, forced: Tensor, lengths: Sequence[int], budget: int, units: Units | None = None
    ) -> list[int]:
        return [min(budget, n) for n in lengths]


@dataclass(frozen=True)
class AdaptiveHeads:
    """Ada-KV (arXiv:2407.11550): the heads' scores compete in one pool; each head is sure of a floor.

    Deviations: the floor is `alpha` of an equal share, taken by each head's best tokens before the pool is opened,
    where the authors' code mixes the two counts after the fact; both conserve the total. Where units are kept whole,
    a token competes by what its unit is worth, then by its own score: by what decides in the selection.
    """

    alpha: float = 0.2
    needs_scores = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise BadParameter(f"alpha={self.alpha} must lie between 0 (one pool) and 1 (equal heads).")

    def __call__(
        self, scores: Tensor, forced: Tensor, lengths: Sequence[int], budget: int, units: Units | None = None
    ) -> list[int]:
        kv_heads = len(lengths)
        total = min(kv_heads * budget, sum(lengths))
        sure = self._sure(scores, forced, budget, units)
        winners = best_first(_pooled(scores.masked_fill(sure, INF)))
        if units is not None:
            worth = units.worth.gather(1, units.member).masked_fill(scores == -INF, -INF).masked_fill(sure, INF)
            winners = winners[_pooled(worth)[winners].sort(descending=True, stable=True).indices]
        return torch.bincount(kv_heads - 1 - winners[:total] % kv_heads, minlength=kv_heads).tolist()

    def _sure(self, scores: Tensor, forced: Tensor, budget: int, units: Units | None) -> Tensor:
        """Tokens no other head can take: those that must stay, and the first of what each head would keep."""
        tokens, must = scores > -INF, forced.sum(1)
        floor = must + (self.alpha * (budget - must).clamp_min(0).double()).floor().long()
        place = ranked(scores, forced, tokens, units).argsort(dim=1)  # 0 for a head's best token
        return (place < floor[:, None]) & tokens


def _pooled(scores: Tensor) -> Tensor:
    """One row, token-major, heads in falling order: the later of equals is the later token, then the lower head."""
    return scores.flip(0).t().reshape(-1)
