"""The order of tokens, or of units of any shape, by score, in torch.

Forced tokens come first; then whole units, best first; the unit that no longer fits is cut to its best tokens. Ties go
to the later unit and the later token. Sorting tokens by (unit, own score) does exactly that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INF = float("inf")


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
    if packs(scores) and scores.ndim == 2 and len(scores) <= ROWS:
        return sort_packed(MOST - sortable(scores))
    n = scores.shape[-1]
    return n - 1 - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices


def ranked(scores: Tensor, forced: Tensor, token_mask: Tensor, units: Units | None) -> Tensor:
    """Each head's tokens by priority, padding last. [kv_heads, n]"""
    tier = scores.new_ones(scores.shape, dtype=torch.int64)
    if units is not None:
        tier += _rank(units.scores).gather(1, units.member)
    tier = tier.masked_fill(forced, 0).masked_fill(~token_mask, 2**20 - 1)
    if packs(scores):
        return sort_packed(tier << 32 | MOST - sortable(scores))
    order = best_first(scores)
    return order.gather(1, tier.gather(1, order).sort(dim=1, stable=True).indices)


def ranks(
    scores: Tensor,
    forced: Tensor,
    token_mask: Tensor | None,
    member: Tensor | None = None,
    unit_scores: Tensor | None = None,
) -> Tensor:
    """The place of each token in its head's order: `inverse` of `ranked`; token_mask: None for all. [kv_heads, n]"""
    if token_mask is None:
        token_mask = torch.ones_like(forced)
    units = None if member is None or unit_scores is None else Units(member, unit_scores)
    return inverse(ranked(scores, forced, token_mask, units))


def places_of(rank: Tensor, counts: Tensor, total: int) -> Tensor:
    """Head and index of the first `counts` tokens of each head, ascending, `total` in all. [2, total]"""
    kept = (rank < counts[:, None]).flatten()
    place, index = torch.where(kept, kept.cumsum(0) - 1, total), torch.arange(len(kept), device=kept.device)
    found = index.new_empty(total + 1).scatter_(0, place, index)[:total]  # the host does not wait for a number
    return torch.stack([found // rank.shape[1], found % rank.shape[1]])


def inverse(order: Tensor) -> Tensor:
    """The place of each index in an order of them. [rows, n]"""
    places = torch.arange(order.shape[1], device=order.device)
    return torch.empty_like(order).scatter_(1, order, places.expand_as(order))


def _rank(scores: Tensor) -> Tensor:
    """Rank of each unit: 0 for the best. [kv_heads, units]"""
    return inverse(best_first(scores))


def top_counts(
    scores: Tensor, rank: Tensor, floor: Tensor, total: int, member: Tensor | None, unit_scores: Tensor | None
) -> Tensor:
    """How many of the `total` best tokens of all heads are each head's, those within its floor first. [kv_heads]"""
    kv_heads = len(scores)
    reserved = (rank < floor[:, None]) & (scores > -INF)
    winners = all_best_first(scores, reserved, member, unit_scores)[:total]
    head = kv_heads - 1 - winners % kv_heads
    return (head[:, None] == torch.arange(kv_heads, device=head.device)).sum(0)


def top_counts_of_layers(
    layers: int, scores: Tensor, rank: Tensor, floor: Tensor, total: int, member: Tensor | None,
    unit_scores: Tensor | None,
) -> Tensor:  # fmt: skip
    """`top_counts` of each layer's heads, one layer after the other, without a sort for each. [layers * kv_heads]"""
    heads, size = len(scores) // layers, len(scores) // layers * scores.shape[1]
    if not packs(scores) or layers > ROWS or size > 2**20:
        s, r, f = (each.chunk(layers) for each in (scores, rank, floor))
        m, u = ([None] * layers if each is None else each.chunk(layers) for each in (member, unit_scores))
        return torch.cat([top_counts(s[i], r[i], f[i], total, m[i], u[i]) for i in range(layers)])
    reserved = (rank < floor[:, None]) & (scores > -INF)

    def by_layer(values: Tensor) -> Tensor:
        return values.masked_fill(reserved, INF).view(layers, heads, -1).flip(1).transpose(1, 2).reshape(layers, size)

    order = best_first(by_layer(scores))
    if member is not None and unit_scores is not None:
        unit = unit_scores.gather(1, member).masked_fill(scores == -INF, -INF)
        order = sort_packed(MOST - sortable(by_layer(unit)) << 20 | inverse(order))
    winner = heads - 1 - order[:, :total] % heads
    return (winner[..., None] == torch.arange(heads, device=order.device)).sum(1).flatten()


def all_best_first(scores: Tensor, reserved: Tensor, member: Tensor | None, unit_scores: Tensor | None) -> Tensor:
    """The tokens of all heads, best first. [kv_heads * n] places in `token_major` order"""
    own = token_major(scores.masked_fill(reserved, INF))
    if member is None or unit_scores is None:
        return best_first(own[None])[0]
    unit = unit_scores.gather(1, member).masked_fill(scores == -INF, -INF)
    unit = token_major(unit.masked_fill(reserved, INF))
    if packs(own) and packs(unit):
        return sort_packed((MOST // 2 - sortable(unit) << 32 | MOST - sortable(own))[None])[0]
    order = best_first(own)
    return order[unit[order].sort(descending=True, stable=True).indices]


def token_major(scores: Tensor) -> Tensor:
    """One row, tokens by tokens, heads in descending order: ties go to the later token, then the lower head."""
    return scores.flip(0).t().reshape(-1)


# A GPU sorts long rows one after the other, in a dozen kernels each: there, all rows and both keys are sorted at once.

MOST = 2**32 - 1
ROWS = 2**11  # whose numbers, above 52 bits of key, are 63 bits


def packs(scores: Tensor) -> bool:
    return scores.device.type == "cuda" and scores.dtype == torch.float32


def sortable(scores: Tensor) -> Tensor:
    """Integers 0 … MOST in the order of float32 scores; 0 and -0 are equal."""
    bits = (scores + 0.0).view(torch.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() + 2**31


def sort_packed(keys: Tensor) -> Tensor:
    """Indices that sort each row, ties to the later one. keys [rows, n], 0 … 2**52; rows: at most ROWS"""
    rows, n = keys.shape
    row = torch.arange(rows, device=keys.device)[:, None]
    order = (keys.flip(1) + (row << 52)).flatten().sort(stable=True).indices
    return n - 1 - (order.view(rows, n) - row * n)
