"""One layer's keys and values: ragged over rows and KV heads, in flat buffers that hold nothing else.

Segments lie row by row, head by head. Room for growth is a 64th of a segment, so memory exceeds what is kept by at
most 1.6 %, and a decode step copies at most 64 tokens per head on average.

A quantized layer holds keys and values in the model's dtype only during a forward pass of several tokens, or while
nothing is evicted from a prompt in several passes (`whole`). After it they are codes (quantized.py), and every read
returns a dequantized copy.
(Longer than most files: no other class may touch these buffers.)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvkeep.kernels.dispatch import append_ragged, extend_attention, ragged_attention, segment_attention
from kvkeep.kernels.torch.quantization import GROUP_SIZE
from kvkeep.kernels.torch.reference import uniform_stride
from kvkeep.storage.places import Places
from kvkeep.storage.quantized import QuantizedLayer, whole_groups
from kvkeep.storage.upload import upload
from kvkeep.types import NOTHING, PAD_POSITION, Tokens

GROWTH = 64
EMPTY = Tokens(torch.empty(0, 0), torch.empty(0, 0), NOTHING)


class LayerKind(NamedTuple):
    """The shape of one layer's keys and values, and where they are."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def slot_bytes(self) -> int:
        return (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerSnapshot:
    """The part of a layer's state that `append` changes."""

    lengths: list[int]
    tails: tuple[Tensor, Tensor] | None = None  # of a quantized layer, where more than one token may be undone


class RaggedLayer:
    """Sole owner of a layer's tokens."""

    def __init__(self, bits: int | None = None) -> None:
        """bits: 8 or 4; None: not quantized"""
        self.bits = bits
        self.whole = False  # not quantized yet: nothing is evicted before the prompt's last chunk
        self.quantized: QuantizedLayer | None = None  # keys and values, during a forward pass those before it
        self.rows = 0
        self.kv_heads = 0
        self.flat = EMPTY  # the slots of all segments, concatenated; keys and values of width 0 if quantized
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.room: list[int] = []  # slots of each segment, used or not
        self.places = Places(NOTHING, NOTHING, NOTHING)  # the same on the device, so that decoding never waits for it
        self.is_shared = False  # a copy holds the same buffers: nothing more is written into them

    def __bool__(self) -> bool:
        return self.rows > 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, measured on their storages."""
        if self.flat is EMPTY and not self.quantized:
            return 0  # for every layer of every pass this is asked of all layers
        codes = self.quantized.nbytes if self.quantized else 0
        return codes + sum(t.untyped_storage().nbytes() for t in (self.flat.keys, self.flat.values))

    @property
    def codes(self) -> QuantizedLayer | None:
        """The keys and values, while they are held as codes only."""
        return None if self.flat.keys.shape[-1] else self.quantized

    @property
    def index_nbytes(self) -> int:
        """Bytes of positions and token state."""
        return sum(part.nbytes for name, part in self.flat.parts.items() if name not in ("keys", "values"))

    @property
    def kind(self) -> LayerKind:
        """That of keys and values in the model's dtype."""
        codes, flat = self.quantized, self.flat
        keys, values = (codes.tail_keys, codes.tail_values) if codes else (flat.keys, flat.values)
        return LayerKind(self.kv_heads, keys.shape[-1], values.shape[-1], keys.dtype, keys.device)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """(start, length) of every row and KV head."""
        return list(zip(self.starts, self.lengths, strict=True))

    def row_lengths(self, row: int) -> list[int]:
        """Tokens per KV head of one row."""
        return self.lengths[row * self.kv_heads : (row + 1) * self.kv_heads]

    def positions(self) -> list[list[Tensor]]:
        """Token positions, ascending: [row][KV head] -> [n]"""
        heads = [self.flat.token_positions[start : start + n] for start, n in self.segments]
        return [heads[row * self.kv_heads : (row + 1) * self.kv_heads] for row in range(self.rows)]

    def row(self, row: int) -> list[Tokens]:
        """One row's tokens, per KV head, in order of position: views, except of quantized keys and values."""
        mine = self.segments[row * self.kv_heads : (row + 1) * self.kv_heads]
        heads = [self.flat[start : start + length] for start, length in mine]
        if not (codes := self.codes):
            return heads
        pairs = zip(*(part[0] for part in codes.dequantize(slice(row, row + 1))), strict=True)
        return [
            replace(head, keys=keys[:n], values=values[:n])
            for head, (keys, values), (_, n) in zip(heads, pairs, mine, strict=True)
        ]

    def all_rows(self) -> list[list[Tokens]]:
        return [self.row(row) for row in range(self.rows)]

    def dense(self, row: int) -> Tokens:
        """One row as [kv_heads, longest, …]; shorter heads are padded, their positions with PAD_POSITION.

        It is a view where the heads are equally long and not quantized.
        """
        mine = slice(row * self.kv_heads, (row + 1) * self.kv_heads)
        if not self.codes and len(set(self.lengths[mine])) == len(set(self.room[mine])) == 1:
            start, length, room = self.starts[mine.start], self.lengths[mine.start], self.room[mine.start]
            held = self.flat[start : start + self.kv_heads * room]
            return held.map(lambda part: part.unflatten(0, (self.kv_heads, room))[:, :length])
        heads = [head.parts for head in self.row(row)]
        fills = {name: PAD_POSITION if name.endswith("positions") else 0 for name in heads[0]}
        return Tokens(**{name: pad_sequence([head[name] for head in heads], True, fills[name]) for name in fills})

    def fill(
        self, rows: Sequence[Sequence[Tokens]], growth: int = 0, spare: int = 0, sources: Sequence[int] | None = None
    ) -> None:
        """Replace all tokens by copies of these; growth=64 leaves a 64th of room, spare=32 so many slots.

        sources: the old segment of each new one, where it is not the one of the same number
        """
        if self.bits and not self.whole:
            known = self._unchanged_groups([segment for row in rows for segment in row], sources)
            self.quantized = QuantizedLayer.of(rows, self.bits, growth, self.quantized, known)
            rows = [[replace(each, keys=each.keys[:, :0], values=each.values[:, :0]) for each in row] for row in rows]
        self.hold(rows, growth, spare)

    def clear(self) -> None:
        """Free all tokens; they are held elsewhere."""
        self.flat, self.rows, self.starts, self.lengths, self.room = EMPTY, 0, [], [], []

    def hold(self, rows: Sequence[Sequence[Tokens]], growth: int = 0, spare: int = 0) -> None:
        """Fill the layer, in the model's dtype until `quantize`."""
        segments = [segment for row in rows for segment in row]
        lengths = [len(segment.token_positions) for segment in segments]
        room = [n + spare + (n // growth if growth else 0) for n in lengths]
        *starts, total = accumulate(room, initial=0)
        if room == lengths:
            flat = Tokens(**{name: torch.cat([each.parts[name] for each in segments]) for name in segments[0].parts})
        else:
            flat = segments[0].map(lambda like: like.new_empty(total, *like.shape[1:]))
            for segment, start in zip(segments, starts, strict=True):
                for name, part in segment.parts.items():
                    flat.parts[name][start : start + len(part)] = part
        self.adopt(flat, lengths, len(rows), room)

    def adopt(self, flat: Tokens, lengths: Sequence[int], rows: int, room: Sequence[int] | None = None) -> None:
        """Replace all tokens by these, which nobody else holds: segment after segment.

        room: slots of each segment, where there are more than tokens
        """
        self.flat, self.is_shared = flat, False
        self.rows, self.kv_heads = rows, len(lengths) // rows
        self.lengths, self.room = list(lengths), list(room or lengths)
        *self.starts, _ = accumulate(self.room, initial=0)
        self.place()

    def _unchanged_groups(self, segments: Sequence[Tokens], sources: Sequence[int] | None) -> Tensor | None:
        """The quantized group that each complete group of these tokens equals, -1 for none. [groups]

        They are equal if the old segment had the same tokens there, and their keys have not been rotated since.
        """
        if self.quantized is None:
            return None
        counts = [len(segment.token_positions) // GROUP_SIZE for segment in segments]
        pairs = zip(sources or range(len(segments)), counts, strict=True)
        groups = [(source, g) for source, count in pairs for g in range(count)]
        tensor = partial(torch.tensor, dtype=torch.int64, device=self.flat.token_positions.device)
        known = tensor([self.quantized.group(*each) for each in groups])
        first = tensor([self.starts[source] + g * GROUP_SIZE for source, g in groups])
        slots = first[:, None] + torch.arange(GROUP_SIZE, device=first.device)
        slots = slots.clamp_max(len(self.flat.token_positions) - 1)
        for name in self.flat.parts.keys() & {"token_positions", "rope_positions"}:
            new = whole_groups([segment.parts[name] for segment in segments])
            known = torch.where((new == self.flat.parts[name][slots]).all(1), known, -1)
        return known

    def quantize(self) -> None:
        """Quantize keys and values after a forward pass of several tokens, if the layer has bits."""
        if self and self.bits and not (self.codes or self.whole):
            self.fill(self.all_rows())

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Sequence[Tensor],
        columns: Sequence[Tensor] | None,
        to_come: int = 0,
    ) -> None:
        """Add new tokens at the end of every segment; to_come: of these and those that follow soon.

        keys, values [rows, kv_heads, q, dim]; per row the positions of its new tokens and the columns of the q that are
        not padding (None: all of them, in every row). A quantized layer quantizes single tokens at once, several later.
        """
        single = columns is None and keys.shape[2] == 1
        if single and (codes := self.codes) and not (codes.has_room and self._has_room(1)):
            self.fill(self.all_rows(), GROWTH, spare=GROUP_SIZE)
        if single and (codes := self.codes):
            codes.append(keys[:, :, 0], values[:, :, 0])
            return self.count_appended(torch.stack(list(positions)))
        if columns is None and not self.codes:
            self.reserve(keys.shape[2], to_come)
            return self._write(keys, values, torch.stack(list(positions)))
        rows = []
        for row, where in enumerate(positions):
            each = (new[row] if columns is None else new[row][:, columns[row]] for new in (keys, values))
            heads = zip(self.row(row), *each, strict=True)
            rows.append([_concat(old, self._new(k, v, where)) for old, k, v in heads])
        self.hold(rows, GROWTH)

    def reserve(self, count: int, to_come: int = 0) -> None:
        """Make room for so many more tokens in every segment, and a 64th beyond, or for those `to_come`."""
        if self._has_room(count):
            return
        room = [n + max(count + (n + count) // GROWTH, to_come) for n in self.lengths]
        *starts, total = accumulate(room, initial=0)
        before, lengths, tokens = self.places.starts.flatten(), self.places.lengths.flatten(), sum(self.lengths)
        moves = torch.stack([before, upload(starts, before.device)])
        shifts = moves - (lengths.cumsum(0) - lengths)  # of each segment's tokens
        every = torch.arange(tokens, device=before.device)
        source, target = shifts.repeat_interleave(lengths, dim=1, output_size=tokens) + every
        flat = self.flat.map(lambda t: t.new_empty(total, *t.shape[1:]).index_copy_(0, target, t[source]))
        self.adopt(flat, self.lengths, self.rows, room)

    @property
    def can_capture(self) -> bool:
        """Tokens can be appended by the device alone."""
        return bool(self) and self._writable

    def count_appended(self, positions: Tensor) -> None:
        """Count tokens whose keys and values the device has appended. positions [rows, count]"""
        count = positions.shape[1]
        where = positions[:, None].expand(-1, self.kv_heads, -1).reshape(-1)
        slots, new, flat = self.places.free(count), self._new(NOTHING, NOTHING, where).parts, self.flat.parts
        for name in flat.keys() - {"keys", "values"}:
            flat[name].index_copy_(0, slots, new[name].to(flat[name].dtype))
        self.lengths = [length + count for length in self.lengths]
        self.places.lengths += count

    def _has_room(self, count: int) -> bool:
        fits = all(used + count <= room for used, room in zip(self.lengths, self.room, strict=True))
        return fits and self._writable and not self.is_shared

    @property
    def _writable(self) -> bool:
        return torch.is_inference_mode_enabled() or not self.flat.token_positions.is_inference()

    def _new(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tokens:
        """New tokens of one head: at their own positions, with empty token state."""
        rope_positions = None if self.flat.rope_positions is None else positions
        state = self.flat.token_state
        token_state = None if state is None else state.new_zeros(len(positions), *state.shape[1:])
        return Tokens(keys, values, positions, rope_positions, token_state)

    def _write(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Write the same number of new tokens into the room of every segment."""
        flat, places = self.flat, self.places
        keys, values = keys.to(flat.keys.dtype), values.to(flat.values.dtype)
        if positions.shape[1] == 1 and append_ragged.uses_kernel(keys):
            append_ragged(flat.keys, flat.values, keys, values, places.starts, places.lengths.clone(), places.active)
        else:
            slots = places.free(positions.shape[1])
            for buffer, new in ((flat.keys, keys), (flat.values, values)):
                buffer.index_copy_(0, slots, new.flatten(0, 2))
        self.count_appended(positions)

    def attend(self, queries: Tensor, counts: Sequence[int], *how: Any) -> Tensor:
        """Attention of each row's queries [rows, heads, q, dim], the last `counts` of which are tokens. -> the same

        how: scale, softcap, sink_logits
        """
        if codes := self.codes:
            return codes.attend(queries, *how)
        keys, values, padded = self.flat.keys, self.flat.values, set(counts) != {queries.shape[2]}
        is_step = not padded and ragged_attention.uses_kernel(queries)  # of single queries
        dense = not (is_step or padded) and how[1:] == (None, None) and uniform_stride(self.segments)
        if dense or queries.requires_grad or not (is_step or extend_attention.uses_kernel(queries)):
            return segment_attention(queries, keys, values, self.segments, counts, *how)
        segments = queries.to(keys.dtype), keys, values, self.places.starts, self.places.lengths
        if not is_step:
            return extend_attention(*segments, upload(list(counts), keys.device), *how).to(queries.dtype)
        longest = 1 << (max(self.lengths) - 1).bit_length()  # rounded up: what is compiled for it serves many steps
        return ragged_attention(*segments, longest, *how).to(queries.dtype)

    def place(self) -> None:
        """Tell the device where the segments lie."""
        self.places = Places.of(self.starts, self.lengths, self.rows, self.flat.token_positions.device)

    def snapshot(self, several: bool = False) -> LayerSnapshot:
        """The state before the next token, or before the next several, for `restore`."""
        held = self.quantized if several else None
        tails = (held.tail_keys.clone(), held.tail_values.clone()) if held else None
        return LayerSnapshot(self.lengths, tails)

    def restore(self, snapshot: LayerSnapshot) -> None:
        """Undo what was appended since."""
        self.lengths = list(snapshot.lengths)
        self.place()
        if self.quantized:
            self.quantized.truncate(self.lengths, snapshot.tails)
            self.quantize()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed: beam search and batch selection."""
        sources = [row * self.kv_heads + head for row in rows for head in range(self.kv_heads)]
        self.fill([self.row(row) for row in rows], sources=sources)

    def copy(self) -> RaggedLayer:
        """An independent layer. Both hold the same buffers until they append; codes are copied."""
        copied = copy.copy(self)
        if self and self.bits:
            copied.fill(self.all_rows())
        elif self:
            copied.places = replace(self.places, lengths=self.places.lengths.clone())  # counted on in place
            self.is_shared = copied.is_shared = True
        return copied


def _concat(old: Tokens, new: Tokens) -> Tokens:
    return Tokens(**{name: torch.cat([part, new.parts[name].to(part.dtype)]) for name, part in old.parts.items()})
