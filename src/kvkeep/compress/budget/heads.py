"""Head budgets: (scores, forced, lengths, budget, units) -> tokens per key head.

scores [kv_heads, n], -inf beyond a head's length; forced [kv_heads, n]: tokens that are always kept; units: groups of
tokens selected whole, None for single tokens.
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
    """Ada-KV (arXiv:2407.11550): tokens of all heads compete by score; each head has a guaranteed floor.

    Deviations: the floor is `alpha` of an equal budget, taken by each head's best tokens before heads compete, where
    the authors' code mixes the two counts afterwards; both conserve the total. With units, a token competes by its
    unit's score, then by its own, as in the selection.
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
        reserved = self._reserved(scores, forced, budget, units)
        order = best_first(_token_major(scores.masked_fill(reserved, INF)))
        if units is not None:
            unit_scores = units.scores.gather(1, units.member).masked_fill(scores == -INF, -INF)
            unit_scores = _token_major(unit_scores.masked_fill(reserved, INF))
            order = order[unit_scores[order].sort(descending=True, stable=True).indices]
        return torch.bincount(kv_heads - 1 - order[:total] % kv_heads, minlength=kv_heads).tolist()

    def _reserved(self, scores: Tensor, forced: Tensor, budget: int, units: Units | None) -> Tensor:
        """Forced tokens, and the best ones of each head up to its floor."""
        tokens, count = scores > -INF, forced.sum(1)
        floor = count + (self.alpha * (budget - count).clamp_min(0).double()).floor().long()
        rank = ranked(scores, forced, tokens, units).argsort(dim=1)  # 0 for a head's best token
        return (rank < floor[:, None]) & tokens


def _token_major(scores: Tensor) -> Tensor:
    """One row, tokens by tokens, heads in descending order: ties go to the later token, then the lower head."""
    return scores.flip(0).t().reshape(-1)
