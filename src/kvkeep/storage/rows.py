"""One layer's keys and values of many rows, which come and go without moving each other.

Each row and KV head has a span of its own in one buffer. Where it begins and how many tokens it has is known on the
device alone, so that a decode step of all rows can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from kvkeep.storage.places import Places
from kvkeep.storage.quantized import QuantizedLayer
from kvkeep.storage.ragged import LayerKind, RaggedLayer
from kvkeep.storage.upload import upload

Source = tuple[Tensor, Tensor, int]  # first slot and end of every segment that is copied, and tokens of all


class Rows:
    """Rows in the model's dtype; those that are not in use write to one extra slot at the end."""

    def __init__(self, kind: LayerKind, slots: int) -> None:
        self.kind = kind
        self.keys, self.values = (
            torch.zeros(slots + 1, dim, dtype=kind.dtype, device=kind.device) for dim in (kind.key_dim, kind.value_dim)
        )

    def grow(self, rows: int, slots: int) -> None:
        """Make room for more; what is there stays where it is."""
        larger = Rows(self.kind, slots)
        for new, old in ((larger.keys, self.keys), (larger.values, self.values)):
            new[: len(old) - 1] = old[:-1]
        self.keys, self.values = larger.keys, larger.values

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def put(self, row: int, starts: Sequence[int], target: Tensor, layer: Any, source: Source) -> None:
        """Copy segments of a layer to spans that begin here; target: `starts`, on the device"""
        flat = layer.flat
        copy_segments(self.keys, self.values, target, (flat.keys, flat.values), *source)

    def copy_decoded(self, row: int, starts: Sequence[int], layer: RaggedLayer, positions: Tensor) -> None:
        """Append a row's newest tokens, at these positions, to the layer that `put` copied."""
        ends = [start + n for start, n in zip(starts, layer.row_lengths(0), strict=True)]
        new = torch.arange(len(positions), device=positions.device)
        slots = upload(ends, positions.device)[:, None] + new
        layer.append(self.keys[slots][None], self.values[slots][None], [positions], None)

    def step(self, query: Tensor, key: Tensor, value: Tensor, places: Places, longest: int, *how: Any) -> Tensor:
        """Append one token to each of the first rows that are in use, and attend. [rows, heads or kv_heads, 1, dim]

        how: scale, softcap, sink_logits
        """
        return attend_step(self.keys, self.values, query, key, value, places, longest, *how)


def attend_step(
    keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, places: Places, longest: int, *how: Any
) -> Tensor:
    """`Rows.step` over any buffers."""
    starts, lengths, active = places.first(len(key))
    append_ragged(keys, values, key, value, starts, lengths, active)
    return ragged_attention(query, keys, values, starts, lengths, longest, *how)


class QuantizedRows:
    """Complete groups quantized, and a tail for each row and KV head; rows that are not in use write nothing."""

    def __init__(self, kind: LayerKind, rows: int, slots: int, bits: int) -> None:
        self.kind, self.bits = kind, bits
        groups = max(1, -(-slots // GROUP_SIZE))
        how = bits, kind.dtype, kind.device
        self.kv = QuantizedKV.empty(groups * GROUP_SIZE, kind.key_dim, kind.value_dim, *how)
        self.tails = [
            torch.zeros(rows, kind.kv_heads, GROUP_SIZE, dim, dtype=kind.dtype, device=kind.device)
            for dim in (kind.key_dim, kind.value_dim)
        ]

    def grow(self, rows: int, slots: int) -> None:
        larger = QuantizedRows(self.kind, rows, slots, self.bits)
        for new, old in zip((*larger.kv.tensors, *larger.tails), (*self.kv.tensors, *self.tails), strict=True):
            new[: len(old)] = old
        self.kv, self.tails = larger.kv, larger.tails

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + sum(tail.nbytes for tail in self.tails)

    def put(self, row: int, starts: Sequence[int], target: Tensor, layer: Any, source: Source) -> None:
        """Copy the groups of a layer of one row that is quantized alike; quantize another one."""
        codes = layer.codes
        quantized = codes if codes and codes.bits == self.bits else QuantizedLayer.of([layer.row(0)], self.bits)
        self._copy_groups(quantized, starts, to_layer=False)
        for tail, part in zip(self.tails, (quantized.tail_keys, quantized.tail_values), strict=True):
            tail[row] = part[0]

    def copy_decoded(self, row: int, starts: Sequence[int], layer: RaggedLayer, positions: Tensor) -> None:
        """Groups are copied as they are, not quantized again."""
        shape = 1, layer.kv_heads, len(positions)
        keys, values = (tail.new_zeros(*shape, tail.shape[-1]) for tail in self.tails)
        layer.append(keys, values, [positions], None)
        layer.quantize()
        mine = layer.codes
        assert mine is not None  # it was quantized when `put` copied it
        self._copy_groups(mine, starts, to_layer=True)
        for tail, part in zip(self.tails, (mine.tail_keys, mine.tail_values), strict=True):
            part[0] = tail[row]

    def _copy_groups(self, layer: QuantizedLayer, starts: Sequence[int], to_layer: bool) -> None:
        """Copy a row's complete groups from a layer, or to it. starts: of the row's spans here"""
        pairs = [
            (first + g, start // GROUP_SIZE + g)
            for first, start, n in zip(layer.firsts, starts, layer.lengths, strict=True)
            for g in range(n // GROUP_SIZE)
        ]
        theirs, ours = torch.tensor(pairs, dtype=torch.int64, device=self.kv.device).view(-1, 2).unbind(1)
        if to_layer:
            copy_groups(self.kv, ours, layer.kv, theirs)
        else:
            copy_groups(layer.kv, theirs, self.kv, ours)

    def step(self, query: Tensor, key: Tensor, value: Tensor, places: Places, longest: int, *how: Any) -> Tensor:
        """Append one token to each of the first rows that are in use, and attend; see `Rows.step`."""
        starts, lengths, active = places.first(len(key))
        tails = [tail[: len(key)] for tail in self.tails]
        append_quantized(self.kv, *tails, key[:, :, 0], value[:, :, 0], starts, lengths, active)
        return quantized_attention(query, self.kv, *tails, starts, lengths, longest, *how)


def span_size(tokens: int, bits: int | None) -> int:
    """Slots that one KV head needs for so many tokens; quantized, those of complete groups, of one at least."""
    return max(1, tokens // GROUP_SIZE) * GROUP_SIZE if bits else tokens


def new_rows(kind: LayerKind, rows: int, slots: int, bits: int | None) -> Rows | QuantizedRows:
    """Make rows with so many slots in all. bits: 8 or 4, None: not quantized"""
    return QuantizedRows(kind, rows, slots, bits) if bits else Rows(kind, slots)


@contextmanager
def restored(parts: Sequence[Tensor]) -> Iterator[None]:
    """Within, these tensors may change; afterwards they are as before."""
    saved = [part.clone() for part in parts]
    try:
        yield
    finally:
        for part, before in zip(parts, saved, strict=True):
            part.copy_(before)
