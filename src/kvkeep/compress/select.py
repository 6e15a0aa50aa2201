"""Top-k selection of tokens or of units of any shape, per KV head; kernels/torch/ranking.py has the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvkeep.kernels.dispatch import places_of
from kvkeep.kernels.torch.ranking import Units, ranked
from kvkeep.types import Selection


def select(scores: Tensor, forced: Tensor, token_mask: Tensor, units: Units | None, quota: Sequence[int]) -> Selection:
    """Keep `quota` tokens of each key head. scores, forced, token_mask [kv_heads, n]"""
    return first(ranked(scores, forced, token_mask, units), quota)


def first(order: Tensor, quota: Sequence[int]) -> Selection:
    """The first `quota` of each head's order, in ascending order of index."""
    longest = max(quota)
    index = order[:, :longest]
    if min(quota) != longest:
        allowed = torch.tensor(quota, device=order.device)[:, None]
        index = index.masked_fill(torch.arange(longest, device=order.device) >= allowed, order.shape[1])
    return Selection(index.sort(dim=1).values, tuple(quota))


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
