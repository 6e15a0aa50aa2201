"""One layer's buffers in a row pool: in the model's dtype, or quantized to 8 or 4 bits.

Each row and KV head has a span of its own; the pool tracks where it starts and how many tokens it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import (
    append_quantized,
    append_ragged,
    copy_segments,
    quantized_attention,
    ragged_attention,
)
from kvkeep.kernels.torch.quantization import GROUP_SIZE, QuantizedKV, copy_groups
from kvkeep.storage.quantized import QuantizedLayer
from kvkeep.storage.ragged import RaggedLayer
from kvkeep.storage.upload import upload


class RaggedBuffer:
    """The model's dtype; one extra slot at the end, where inactive rows write."""

    def __init__(self, tokens: int, dim: int, dtype: torch.dtype, device: Any, value_dim: int | None = None):
        """value_dim: None: as keys"""
        self.keys, self.values = (
            torch.zeros(tokens + 1, each, dtype=dtype, device=device) for each in (dim, value_dim or dim)
        )

    def grow(self, rows: int, tokens: int) -> None:
        """Make room for more; what is there stays where it is."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(tokens + 1, old.shape[1])
            new[: len(old) - 1] = old[:-1]
            setattr(self, name, new)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @staticmethod
    def slots(tokens: int) -> int:
        """Slots that one KV head needs."""
        return tokens

    def put(self, row: int, starts: Sequence[int], on_device: Tensor, layer: RaggedLayer) -> None:
        """Copy the tokens of a cache of one row. starts: of each KV head's span, on the device, too"""
        flat, first, ends, total = layer.flat, layer.segment_starts, layer.ends, sum(layer.lengths)
        keys, values = flat.keys, flat.values
        if layer.codes:
            keys, values = (torch.cat([getattr(each, name) for each in layer.row(0)]) for name in ("keys", "values"))
            ends = (ends - first).cumsum(0)
            first = ends - (layer.ends - first)
        copy_segments(self.keys, self.values, on_device, (keys, values), first, ends, total)

    def copy_decoded(self, row: int, starts: Sequence[int], layer: RaggedLayer, positions: Tensor) -> None:
        """Append a row's newest tokens, at these positions, to the layer that `put` copied."""
        ends = [start + n for start, n in zip(starts, layer.row_lengths(0), strict=True)]
        new = torch.arange(len(positions), device=positions.device)
        slots = upload(ends, positions.device)[:, None] + new
        layer.append(self.keys[slots][None], self.values[slots][None], [positions], None)

    def append(self, key: Tensor, value: Tensor, starts: Tensor, lengths: Tensor, active: Tensor) -> None:
        """One token for each of the first rows, counted where active. [rows, kv_heads, 1, dim]"""
        append_ragged(self.keys, self.values, key, value, starts, lengths, active)

    def attend(self, query: Tensor, starts: Tensor, lengths: Tensor, longest: int, *how: Any) -> Tensor:
        """how: scale, softcap, sink_logits"""
        return ragged_attention(query, self.keys, self.values, starts, lengths, longest, *how)


class QuantizedBuffer:
    """Complete groups quantized, and a tail for each row and KV head; inactive rows write nothing."""

    def __init__(self, rows: int, kv_heads: int, tokens: int, dim: int, bits: int, dtype: torch.dtype, device: Any):
        slots = -(-tokens // GROUP_SIZE) * GROUP_SIZE
        self.kv = QuantizedKV.empty(max(GROUP_SIZE, slots), dim, dim, bits, dtype, device)
        self.tails = [torch.zeros(rows, kv_heads, GROUP_SIZE, dim, dtype=dtype, device=device) for _ in range(2)]

    def grow(self, rows: int, tokens: int) -> None:
        like = self.tails[0]
        larger = QuantizedBuffer(rows, like.shape[1], tokens, like.shape[3], self.kv.bits, like.dtype, like.device)
        for new, old in zip((*larger.kv.tensors, *larger.tails), (*self.kv.tensors, *self.tails), strict=True):
            new[: len(old)] = old
        self.kv, self.tails = larger.kv, larger.tails

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + sum(tail.nbytes for tail in self.tails)

    @staticmethod
    def slots(tokens: int) -> int:
        """Slots of complete groups, of one at least."""
        return max(1, tokens // GROUP_SIZE) * GROUP_SIZE

    def put(self, row: int, starts: Sequence[int], on_device: Tensor, layer: RaggedLayer) -> None:
        """Copy the groups of a layer quantized alike; quantize another one."""
        codes, bits = layer.codes, self.kv.bits
        quantized = codes if codes and codes.bits == bits else QuantizedLayer.of([layer.row(0)], bits)
        pairs = [
            (first + g, start // GROUP_SIZE + g)
            for first, start, n in zip(quantized.firsts, starts, quantized.lengths, strict=True)
            for g in range(n // GROUP_SIZE)
        ]
        source, target = torch.tensor(pairs, dtype=torch.int64, device=self.kv.device).view(-1, 2).unbind(1)
        copy_groups(quantized.kv, source, self.kv, target)
        for tail, part in zip(self.tails, (quantized.tail_keys, quantized.tail_values), strict=True):
            tail[row] = part[0]

    def copy_decoded(self, row: int, starts: Sequence[int], layer: RaggedLayer, positions: Tensor) -> None:
        """Groups are copied as they are, not quantized again."""
        shape = 1, layer.kv_heads, len(positions), self.tails[0].shape[-1]
        blank = self.tails[0].new_zeros(shape)
        layer.append(blank, blank, [positions], None)
        layer.quantize()
        mine = layer.codes
        assert mine is not None  # it was quantized when `put` copied it
        pairs = [
            (start // GROUP_SIZE + g, first + g)
            for first, start, n in zip(mine.firsts, starts, mine.lengths, strict=True)
            for g in range(n // GROUP_SIZE)
        ]
        source, target = torch.tensor(pairs, dtype=torch.int64, device=self.kv.device).view(-1, 2).unbind(1)
        copy_groups(self.kv, source, mine.kv, target)
        for tail, part in zip(self.tails, (mine.tail_keys, mine.tail_values), strict=True):
            part[0] = tail[row]

    def append(self, key: Tensor, value: Tensor, starts: Tensor, lengths: Tensor, active: Tensor) -> None:
        tails = [tail[: len(starts)] for tail in self.tails]
        append_quantized(self.kv, *tails, key[:, :, 0], value[:, :, 0], starts, lengths, active)

    def attend(self, query: Tensor, starts: Tensor, lengths: Tensor, longest: int, *how: Any) -> Tensor:
        tails = [tail[: len(starts)] for tail in self.tails]
        return quantized_attention(query, self.kv, *tails, starts, lengths, longest, *how)


def new_buffer(
    rows: int, kv_heads: int, tokens: int, dim: int, bits: int | None, dtype: torch.dtype, device: Any
) -> RaggedBuffer | QuantizedBuffer:
    """Make a buffer of so many slots. bits: 8 or 4, None: not quantized"""
    if bits is None:
        return RaggedBuffer(tokens, dim, dtype, device)
    return QuantizedBuffer(rows, kv_heads, tokens, dim, bits, dtype, device)
