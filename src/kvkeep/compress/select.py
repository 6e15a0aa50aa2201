"""Top-k selection of tokens or of units of any shape, per key head.

Forced tokens come first; then whole units, best first; the unit that no longer fits is cut to its best tokens. Ties go
to the later unit and the later token. Sorting tokens by (unit, own score) does exactly that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.types import Selection


@dataclass(frozen=True)
class Units:
    """The unit of each token, and the units' scores. Members may be scattered, sizes may differ."""

    member: Tensor  # [kv_heads, n] unit of each token
    scores: Tensor  # [kv_heads, units]

    @classmethod
    def summed(cls, member: Tensor, scores: Tensor, units: int) -> Units:
        """Units scored by the sum of their tokens' scores."""
        return cls(member, scores.new_zeros(scores.shape[0], units).scatter_add(1, member, scores))


def best_first(scores: Tensor) -> Tensor:
    """Indices by descending score along the last axis, ties to the later one."""
    n = scores.shape[-1]
    return n - 1 - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices


def select(scores: Tensor, forced: Tensor, token_mask: Tensor, units: Units | None, quota: Sequence[int]) -> Selection:
    """Keep `quota` tokens of each key head. scores, forced, token_mask [kv_heads, n]"""
    return first(ranked(scores, forced, token_mask, units), quota)


def ranked(scores: Tensor, forced: Tensor, token_mask: Tensor, units: Units | None) -> Tensor:
    """Each head's tokens by priority, padding last. [kv_heads, n]"""
    order = best_first(scores)
    tier = torch.zeros_like(order) if units is None else _rank(units.scores).gather(1, units.member) + 1
    tier = tier.masked_fill(forced, -1).masked_fill(~token_mask, torch.iinfo(order.dtype).max)
    return order.gather(1, tier.gather(1, order).sort(dim=1, stable=True).indices)


def first(order: Tensor, quota: Sequence[int]) -> Selection:
    """The first `quota` of each head's order, in ascending order of index."""
    longest = max(quota)
    index = order[:, :longest]
    if min(quota) != longest:
        allowed = torch.tensor(quota, device=order.device)[:, None]
        index = index.masked_fill(torch.arange(longest, device=order.device) >= allowed, order.shape[1])
    return Selection(index.sort(dim=1).values, tuple(quota))


def _rank(scores: Tensor) -> Tensor:
    """Rank of each unit: 0 for the best. [kv_heads, units]"""
    return best_first(scores).argsort(dim=1)
