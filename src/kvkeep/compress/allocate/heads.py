"""Sharing a layer's budget among its key heads: (scores, forced, lengths, budget) -> tokens per key head.

scores [kv_heads, n], -inf beyond a head's length; forced [kv_heads, n], tokens that stay in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.compress.select import best_first
from kvkeep.errors import BadParameter

INF = float("inf")


@dataclass(frozen=True)
class EqualHeads:
    needs_scores = False

    def __call__(self, scores: Tensor, forced: Tensor, lengths: Sequence[int], budget: int) -> list[int]:
        return [min(budget, n) for n in lengths]


@dataclass(frozen=True)
class AdaptiveHeads:
    """Ada-KV (arXiv:2407.11550): the heads' scores compete in one pool; each head is sure of a floor.

    Deviation: the floor is `alpha` of an equal share, taken by each head's best tokens before the pool is opened,
    where the authors' code mixes the two counts after the fact; both conserve the total.
    """

    alpha: float = 0.2
    needs_scores = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise BadParameter(f"alpha={self.alpha} must lie between 0 (one pool) and 1 (equal heads).")

    def __call__(self, scores: Tensor, forced: Tensor, lengths: Sequence[int], budget: int) -> list[int]:
        kv_heads = len(lengths)
        total = min(kv_heads * budget, sum(lengths))
        sure = forced.sum(1) + (self.alpha * (budget - forced.sum(1)).clamp_min(0).double()).floor().long()
        place = best_first(scores.masked_fill(forced, INF)).argsort(dim=1)  # 0 for a head's best token
        pool = scores.masked_fill((place < sure[:, None]) & (scores > -INF), INF)
        # token-major, heads in falling order: of equal scores the later token wins, then the lower head
        winners = best_first(pool.flip(0).t().reshape(-1))[:total]
        return torch.bincount(kv_heads - 1 - winners % kv_heads, minlength=kv_heads).tolist()
