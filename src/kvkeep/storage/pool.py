"""Where one layer's tokens lie in a pool: as the model makes them, or in 8 or 4 bits.

Each row and key head has a stretch of its own; where it starts and how many tokens it has is the pool's to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import append_packed, append_ragged, attend_packed, attend_ragged
from kvkeep.kernels.torch.quantization import GROUP, Packed, move
from kvkeep.storage.quantized import Coded
from kvkeep.storage.ragged import LayerCache


class Plain:
    """Numbers as they come, and behind them a slot that is nobody's, where free rows write."""

    def __init__(
        self, rows: int, kv_heads: int, tokens: int, dim: int, bits: int | None, dtype: torch.dtype, device: Any
    ):
        self.keys, self.values = (torch.zeros(tokens + 1, dim, dtype=dtype, device=device) for _ in range(2))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @staticmethod
    def slots(tokens: int) -> int:
        """What one key head needs for so many tokens."""
        return tokens

    def put(self, row: int, starts: Sequence[int], layer: LayerCache) -> None:
        """Copy what a cache of one row holds. starts: of each key head's stretch"""
        for start, kept in zip(starts, layer.row(0), strict=True):
            mine = slice(start, start + len(kept.keys))
            self.keys[mine], self.values[mine] = kept.keys, kept.values

    def append(self, key: Tensor, value: Tensor, starts: Tensor, lengths: Tensor, active: Tensor) -> None:
        """One token for each of the first rows, counted where they are active. [rows, kv_heads, 1, dim]"""
        append_ragged(self.keys, self.values, key, value, starts, lengths, active)

    def attend(self, query: Tensor, starts: Tensor, lengths: Tensor, longest: int, *how: Any) -> Tensor:
        """how: scale, softcap, sinks"""
        return attend_ragged(query, self.keys, self.values, starts, lengths, longest, *how)


class Quantised:
    """Complete groups as codes, and a tail for each row and key head; free rows write nothing."""

    def __init__(self, rows: int, kv_heads: int, tokens: int, dim: int, bits: int, dtype: torch.dtype, device: Any):
        slots = -(-tokens // GROUP) * GROUP
        self.packed = Packed.empty(max(GROUP, slots), dim, dim, bits, dtype, device)
        self.tails = [torch.zeros(rows, kv_heads, GROUP, dim, dtype=dtype, device=device) for _ in range(2)]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + sum(tail.nbytes for tail in self.tails)

    @staticmethod
    def slots(tokens: int) -> int:
        """Those of complete groups, of one at least."""
        return max(1, tokens // GROUP) * GROUP

    def put(self, row: int, starts: Sequence[int], layer: LayerCache) -> None:
        """Copy codes as they are; pack what is not stored like that."""
        bits = self.packed.bits
        coded = layer.coded if layer.rests and layer.bits == bits else Coded.of([layer.row(0)], bits)
        pairs = [
            (first + g, start // GROUP + g)
            for first, start, n in zip(coded.firsts, starts, coded.lengths, strict=True)
            for g in range(n // GROUP)
        ]
        theirs, mine = torch.tensor(pairs, dtype=torch.int64, device=self.packed.device).view(-1, 2).unbind(1)
        move(coded.packed, theirs, self.packed, mine)
        for tail, part in zip(self.tails, (coded.tail_keys, coded.tail_values), strict=True):
            tail[row] = part[0]

    def append(self, key: Tensor, value: Tensor, starts: Tensor, lengths: Tensor, active: Tensor) -> None:
        tails = [tail[: len(starts)] for tail in self.tails]
        append_packed(self.packed, *tails, key[:, :, 0], value[:, :, 0], starts, lengths, active)

    def attend(self, query: Tensor, starts: Tensor, lengths: Tensor, longest: int, *how: Any) -> Tensor:
        tails = [tail[: len(starts)] for tail in self.tails]
        return attend_packed(query, self.packed, *tails, starts, lengths, longest, *how)
