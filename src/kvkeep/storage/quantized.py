"""One layer's keys and values quantized to 8 or 4 bits: complete groups of 32 tokens as codes, newer ones in a tail.

The format is that of kernels/torch/quantization.py. A group is quantized once and then only copied, as long as its
tokens and their positions stay the same. A tail still holds its 32 tokens after it was quantized, so that the last
token can be undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import append_quantized, quantized_attention
from kvkeep.kernels.torch.quantization import GROUP_SIZE, QuantizedKV, copy_groups, dequantize_segments, write_groups
from kvkeep.storage.places import Places
from kvkeep.types import Tokens


@dataclass
class QuantizedLayer:
    """Segments row by row, head by head, as in ragged.py; each starts with a group of its own."""

    kv: QuantizedKV
    tail_keys: Tensor  # [rows, kv_heads, 32, dim]
    tail_values: Tensor
    firsts: list[int]  # each segment's first group
    room: list[int]  # groups of each segment, used or not
    lengths: list[int]

    def __post_init__(self) -> None:
        self.place()

    def place(self) -> None:
        """Tell the device where the segments lie."""
        starts = [first * GROUP_SIZE for first in self.firsts]
        self.places = Places.of(starts, self.lengths, len(self.tail_keys), self.tail_keys.device)

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[Tokens]],
        bits: int,
        growth: int = 0,
        before: QuantizedLayer | None = None,
        known: Tensor | None = None,
    ) -> QuantizedLayer:
        """Quantize these tokens; known [groups]: the group of `before` that each complete one equals, -1 for none."""
        segments = [segment for row in rows for segment in row]
        like, value_dim = segments[0].keys, segments[0].values.shape[-1]
        lengths = [len(segment.token_positions) for segment in segments]
        room = [(n + (1 + n // growth if growth else 0)) // GROUP_SIZE for n in lengths]
        *firsts, total = accumulate(room, initial=0)
        kv = QuantizedKV.empty(max(1, total) * GROUP_SIZE, like.shape[-1], value_dim, bits, like.dtype, like.device)
        numbers = [first + g for first, n in zip(firsts, lengths, strict=True) for g in range(n // GROUP_SIZE)]
        groups = torch.tensor(numbers, dtype=torch.int64, device=like.device)
        new = torch.ones_like(groups, dtype=torch.bool)
        if before is not None and known is not None:
            new = known < 0
            copy_groups(before.kv, known[~new], kv, groups[~new])
        keys, values = [segment.keys for segment in segments], [segment.values for segment in segments]
        write_groups(kv, groups[new], whole_groups(keys)[new], whole_groups(values)[new])
        tail_keys, tail_values = (_tails(each).unflatten(0, (len(rows), len(rows[0]))) for each in (keys, values))
        return cls(kv, tail_keys, tail_values, firsts, room, lengths)

    @property
    def bits(self) -> int:
        return self.kv.bits

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, minimums and tails, measured on their storages."""
        return self.kv.nbytes + sum(t.untyped_storage().nbytes() for t in (self.tail_keys, self.tail_values))

    @property
    def has_room(self) -> bool:
        """For one token more in every segment."""
        return all((n + 1) // GROUP_SIZE <= room for n, room in zip(self.lengths, self.room, strict=True))

    def group(self, segment: int, number: int) -> int:
        """The group that holds a segment's complete group of this number; -1 if it has fewer."""
        return self.firsts[segment] + number if number < self.lengths[segment] // GROUP_SIZE else -1

    def append(self, keys: Tensor, values: Tensor) -> None:
        """One token more in every segment, in place. keys, values [rows, kv_heads, dim]"""
        every = self.places.first(len(keys))
        append_quantized(self.kv, self.tail_keys, self.tail_values, keys, values, *every)
        self.lengths = [n + 1 for n in self.lengths]

    def truncate(self, lengths: Sequence[int], tails: tuple[Tensor, Tensor] | None = None) -> None:
        """Undo the last append; tails: as they were at these lengths, where there were several."""
        self.lengths = list(lengths)
        if tails is not None:
            self.tail_keys.copy_(tails[0]), self.tail_values.copy_(tails[1])
        self.place()

    def attend(self, queries: Tensor, *how: Any) -> Tensor:
        """One query per row. queries [rows, heads, 1, dim] -> the same; how: scale, softcap, sink_logits"""
        segments = self.places.starts, self.places.lengths, max(self.lengths)
        return quantized_attention(queries, self.kv, self.tail_keys, self.tail_values, *segments, *how)

    def dequantize(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of some rows. -> [rows, kv_heads, longest, dim], undefined behind a head's own tokens"""
        segments = self.places.starts[rows], self.places.lengths[rows], max(self.lengths)
        return dequantize_segments(self.kv, self.tail_keys[rows], self.tail_values[rows], *segments)


def whole_groups(parts: Sequence[Tensor]) -> Tensor:
    """The complete groups of all segments, concatenated. parts: [n, …] each -> [groups, 32, …]"""
    return torch.cat([part[: len(part) // GROUP_SIZE * GROUP_SIZE] for part in parts]).unflatten(0, (-1, GROUP_SIZE))


def _tails(parts: Sequence[Tensor]) -> Tensor:
    """The last 1 to 32 tokens of every segment, if it has any. parts: [n, dim] each -> [segments, 32, dim]"""
    tails = parts[0].new_zeros(len(parts), GROUP_SIZE, parts[0].shape[-1])
    for tail, part in zip(tails, parts, strict=True):
        newest = part[max(0, len(part) - 1) // GROUP_SIZE * GROUP_SIZE :]
        tail[: len(newest)] = newest
    return tails
