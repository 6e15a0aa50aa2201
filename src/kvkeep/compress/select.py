"""Top-k selection of tokens or of units of any shape, per key head.

Forced tokens come first; then whole units, best first; the unit that no longer fits is cut to its best tokens. Ties go
to the later unit and the later token. Sorting tokens by (unit, own score) does exactly that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvkeep.kernels.kernel_dispatch import KernelDispatch
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
    if packs(scores) and scores.ndim == 2 and len(scores) <= ROWS:
        return sort_packed(MOST - sortable(scores))
    n = scores.shape[-1]
    return n - 1 - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices


def select(scores: Tensor, forced: Tensor, token_mask: Tensor, units: Units | None, quota: Sequence[int]) -> Selection:
    """Keep `quota` tokens of each key head. scores, forced, token_mask [kv_heads, n]"""
    return first(ranked(scores, forced, token_mask, units), quota)


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


def _ranks(
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


def _places_of(rank: Tensor, counts: Tensor, total: int) -> Tensor:
    """Head and index of the first `counts` tokens of each head, ascending, `total` in all. [2, total]"""
    return (rank < counts[:, None]).nonzero().t().contiguous()


ranks = KernelDispatch("ranks", "selection", reference=_ranks)
places_of = KernelDispatch("places_of", "selection", reference=_places_of)


@dataclass(frozen=True)
class PlacedSelection:
    """A selection whose lengths are known to the device alone: the host need not wait for them."""

    places: Tensor  # [2, total] key head and token index of what is kept, head by head, ascending
    counts: Tensor  # [kv_heads] tokens kept per key head

    @classmethod
    def of(cls, rank: Tensor, counts: Tensor, total: int) -> PlacedSelection:
        return cls(places_of(rank, counts, total), counts)

    def known(self) -> Selection:
        """Wait for the lengths."""
        lengths = tuple(self.counts.tolist())
        if len(set(lengths)) == 1:
            return Selection(self.places[1].view(len(lengths), -1), lengths)
        return Selection(pad_sequence(list(self.places[1].split(lengths)), True), lengths)


def inverse(order: Tensor) -> Tensor:
    """The place of each index in an order of them. [rows, n]"""
    places = torch.arange(order.shape[1], device=order.device)
    return torch.empty_like(order).scatter_(1, order, places.expand_as(order))


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
    return inverse(best_first(scores))
