"""One layer's keys and values in 8 or 4 bits: complete groups of 32 tokens as codes, what is newer in a tail.

The format is that of kernels/torch/quantization.py. A group is packed once and then only copied, for as long as its
tokens stay what and where they are. A tail that was packed last still holds its 32 tokens, so that a single one can be
taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import append_packed, attend_packed
from kvkeep.kernels.torch.quantization import GROUP, Packed, move, put, unpacked
from kvkeep.types import Tokens


@dataclass
class Coded:
    """Segments row by row, head by head, as in layer.py; each starts with a group of its own."""

    packed: Packed
    tail_keys: Tensor  # [rows, kv_heads, 32, dim]
    tail_values: Tensor
    firsts: list[int]  # each segment's first group
    room: list[int]  # groups of each segment, used or not
    lengths: list[int]

    def __post_init__(self) -> None:
        shape = self.tail_keys.shape[:2]
        kind = {"dtype": torch.int64, "device": self.tail_keys.device}
        self.starts = torch.tensor(self.firsts, **kind).view(shape) * GROUP
        self.counts = torch.tensor(self.lengths, **kind).view(shape)  # lengths, where kernels find them
        self.active = torch.ones(shape[0], 1, **kind)

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[Tokens]],
        bits: int,
        growth: int = 0,
        before: Coded | None = None,
        known: Tensor | None = None,
    ) -> Coded:
        """Pack these tokens; known [groups]: which group of `before` each complete one is, -1 where it is none."""
        pieces = [piece for row in rows for piece in row]
        like, wide = pieces[0].keys, pieces[0].values.shape[-1]
        lengths = [len(piece.positions) for piece in pieces]
        room = [(n + (1 + n // growth if growth else 0)) // GROUP for n in lengths]
        *firsts, total = accumulate(room, initial=0)
        packed = Packed.empty(max(1, total) * GROUP, like.shape[-1], wide, bits, like.dtype, like.device)
        here = [first + g for first, n in zip(firsts, lengths, strict=True) for g in range(n // GROUP)]
        places = torch.tensor(here, dtype=torch.int64, device=like.device)
        new = torch.ones_like(places, dtype=torch.bool)
        if before is not None and known is not None:
            new = known < 0
            move(before.packed, known[~new], packed, places[~new])
        both = [piece.keys for piece in pieces], [piece.values for piece in pieces]
        keys, values = (whole_groups(parts) for parts in both)
        put(packed, places[new], keys[new], values[new])
        tails = (_tails(parts).unflatten(0, (len(rows), len(rows[0]))) for parts in both)
        return cls(packed, *tails, firsts, room, lengths)

    @property
    def bits(self) -> int:
        return self.packed.bits

    @property
    def nbytes(self) -> int:
        """Bytes of codes, steps, zeros and tails, measured on their storages."""
        return self.packed.nbytes + sum(t.untyped_storage().nbytes() for t in (self.tail_keys, self.tail_values))

    @property
    def has_room(self) -> bool:
        """For one token more in every segment."""
        return all((n + 1) // GROUP <= room for n, room in zip(self.lengths, self.room, strict=True))

    def group(self, segment: int, number: int) -> int:
        """Where a segment's so-manieth complete group is packed; -1 if it has none."""
        return self.firsts[segment] + number if number < self.lengths[segment] // GROUP else -1

    def append(self, keys: Tensor, values: Tensor) -> None:
        """One token more in every segment, in place. keys, values [rows, kv_heads, dim]"""
        append_packed(
            self.packed, self.tail_keys, self.tail_values, keys, values, self.starts, self.counts, self.active
        )
        self.lengths = [n + 1 for n in self.lengths]

    def back_to(self, lengths: Sequence[int]) -> None:
        """Forget the token that came last."""
        self.lengths = list(lengths)
        self.counts = torch.tensor(self.lengths, device=self.counts.device).view_as(self.counts)

    def attend(self, queries: Tensor, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """One query per row. queries [rows, heads, 1, dim] -> [rows, heads, 1, dim]"""
        return attend_packed(
            queries, self.packed, self.tail_keys, self.tail_values, self.starts, self.counts, max(self.lengths), scale,
            softcap, sinks,
        )  # fmt: skip

    def numbers(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of some rows as numbers. -> [rows, kv_heads, longest, dim], anything behind a head's own"""
        tails, places = (self.tail_keys[rows], self.tail_values[rows]), (self.starts[rows], self.counts[rows])
        return unpacked(self.packed, *tails, *places, max(self.lengths))


def whole_groups(parts: Sequence[Tensor]) -> Tensor:
    """The complete groups of every segment, one after the other. parts: [n, …] each -> [groups, 32, …]"""
    return torch.cat([part[: len(part) // GROUP * GROUP] for part in parts]).unflatten(0, (-1, GROUP))


def _tails(parts: Sequence[Tensor]) -> Tensor:
    """The last 1 to 32 tokens of every segment, if it has any. parts: [n, dim] each -> [segments, 32, dim]"""
    tails = parts[0].new_zeros(len(parts), GROUP, parts[0].shape[-1])
    for tail, part in zip(tails, parts, strict=True):
        newest = part[max(0, len(part) - 1) // GROUP * GROUP :]
        tail[: len(newest)] = newest
    return tails
