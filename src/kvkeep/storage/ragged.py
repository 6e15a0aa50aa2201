"""One layer's keys and values: ragged over rows and key heads, in flat buffers that hold nothing else.

Segments lie row by row, head by head. Room for growth is a 64th of a segment, so memory exceeds what is kept by at
most 1.6 %, and a decode step copies at most 64 tokens per head on average.

A cache that drops one token for each that comes does not move the others: the newcomer takes the slot that is free
(`swap_in`), and the one that goes leaves the next free slot (swap.py). Order is restored when somebody looks.

A layer that stores fewer bits holds keys and values as numbers only while a pass of several tokens goes through it.
After that they rest as codes (coded.py), and whoever looks at them gets numbers of his own.
(Longer than most files: nobody else may touch these buffers.)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvkeep.kernels.torch.quantization import GROUP
from kvkeep.storage.quantized import Coded, whole_groups
from kvkeep.types import NOWHERE, Tokens

GROWTH = 64


@dataclass(frozen=True)
class Paused:
    """A layer's state that appending or swapping one token changes."""

    lengths: list[int]
    hole: Tensor | None


class LayerCache:
    """Sole owner of a layer's tokens."""

    def __init__(self, bits: int | None = None) -> None:
        """bits: 8 or 4 a number; None: as many as the model's"""
        self.bits = bits
        self.coded: Coded | None = None  # keys and values, or what they were before the pass under way
        self.rows = 0
        self.kv_heads = 0
        self.flat: Tokens | None = None  # every segment's slots, one after the other; no keys and values if they rest
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.room: list[int] = []  # slots of each segment, used or not
        self.ends = self.firsts = torch.empty(0)
        self.hole: Tensor | None = None  # [segments] the one free slot of each full segment, while tokens are swapped

    def __bool__(self) -> bool:
        return self.flat is not None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, measured on their storages."""
        codes = self.coded.nbytes if self.coded else 0
        return codes + (_bytes(self.flat.keys, self.flat.values) if self.flat else 0)

    @property
    def rests(self) -> bool:
        """Keys and values are held as codes only."""
        return self.coded is not None and self.flat is not None and self.flat.keys is None

    @property
    def index_nbytes(self) -> int:
        """Bytes of what is known of each token beside its key and value."""
        return sum(t.nbytes for t in self.flat.parts[2:] if t is not None) if self.flat else 0

    @property
    def token_nbytes(self) -> int:
        """Bytes one token's key and value take in one key head, as the model makes them."""
        if not self:
            return 0
        like = (self.coded.tail_keys, self.coded.tail_values) if self.coded else self.flat.parts[:2]
        return sum(t.shape[-1] * t.element_size() for t in like)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """(start, length) of every row and key head."""
        self.settle()
        return list(zip(self.starts, self.lengths, strict=True))

    def row_lengths(self, row: int) -> list[int]:
        """Tokens per key head of one row."""
        return self.lengths[row * self.kv_heads : (row + 1) * self.kv_heads]

    def positions(self) -> list[list[Tensor]]:
        """Where the tokens stood in the text, ascending: [row][key head] -> [n]"""
        heads = [self.flat.positions[start : start + n] for start, n in self.segments]
        return [heads[row * self.kv_heads : (row + 1) * self.kv_heads] for row in range(self.rows)]

    def row(self, row: int) -> list[Tokens]:
        """One row's tokens, per key head, in order of position: views, except of keys and values that rest."""
        self.settle()
        mine = self.segments[row * self.kv_heads : (row + 1) * self.kv_heads]
        heads = [self.flat.map(lambda t, s=start, n=length: t[s : s + n]) for start, length in mine]
        if not self.rests:
            return heads
        pairs = zip(*(part[0] for part in self.coded.numbers(slice(row, row + 1))), strict=True)
        return [
            replace(head, keys=keys[:n], values=values[:n])
            for head, (keys, values), (_, n) in zip(heads, pairs, mine, strict=True)
        ]

    def all_rows(self) -> list[list[Tokens]]:
        return [self.row(row) for row in range(self.rows)]

    def dense(self, row: int) -> Tokens:
        """One row as [kv_heads, longest, …]; shorter heads are padded, their positions with NOWHERE."""
        if self.is_even and len(set(self.room)) == 1 and not self.rests:
            return self.even().map(lambda t: t[row])
        heads = [piece.parts for piece in self.row(row)]
        fills = (0, 0, NOWHERE, NOWHERE, 0)
        parts = [
            None if same[0] is None else pad_sequence(same, True, fill)
            for same, fill in zip(zip(*heads, strict=True), fills, strict=True)
        ]
        return Tokens(*parts)

    def fill(
        self,
        rows: Sequence[Sequence[Tokens]],
        growth: int = 0,
        spare: int = 0,
        were: Sequence[int] | None = None,
    ) -> None:
        """Replace everything by copies of these tokens, packed; growth=64 leaves a 64th of room, spare=1 one slot.

        were: which segment of before each one is, where it is not the one of the same number
        """
        if self.bits:
            known = self._known([piece for row in rows for piece in row], were)
            self.coded = Coded.of(rows, self.bits, growth, self.coded, known)
            rows = [[replace(piece, keys=None, values=None) for piece in row] for row in rows]
        self._lay(rows, growth, spare)

    def _lay(self, rows: Sequence[Sequence[Tokens]], growth: int, spare: int = 0) -> None:
        pieces = [piece for row in rows for piece in row]
        lengths = [len(piece.positions) for piece in pieces]
        room = [n + spare + (n // growth if growth else 0) for n in lengths]
        *starts, total = accumulate(room, initial=0)
        flat = pieces[0].map(lambda like: like.new_empty(total, *like.shape[1:]))
        for piece, start in zip(pieces, starts, strict=True):
            for buffer, part in zip(flat.parts, piece.parts, strict=True):
                if buffer is not None:
                    buffer[start : start + len(part)] = part
        self.flat, self.starts, self.lengths, self.room, self.hole = flat, starts, lengths, room, None
        self.rows, self.kv_heads = len(rows), len(rows[0])
        self.mark_ends()

    def _known(self, pieces: Sequence[Tokens], were: Sequence[int] | None) -> Tensor | None:
        """Which packed group each complete group of these tokens is, -1 where it is none. [groups]

        It is one if the segment had the same tokens there, and their keys have not been moved since.
        """
        if self.coded is None or self.flat is None:
            return None
        of = were or range(len(pieces))
        groups = [(was, g) for was, piece in zip(of, pieces, strict=True) for g in range(len(piece.positions) // GROUP)]
        device = self.flat.positions.device
        packed = torch.tensor([self.coded.group(*each) for each in groups], dtype=torch.int64, device=device)
        first = torch.tensor([self.starts[was] + g * GROUP for was, g in groups], dtype=torch.int64, device=device)
        slots = (first[:, None] + torch.arange(GROUP, device=device)).clamp_max(len(self.flat.positions) - 1)
        for old, *new in zip(self.flat.parts[2:4], *(piece.parts[2:4] for piece in pieces), strict=True):
            if old is not None:
                packed = torch.where((whole_groups(new) == old[slots]).all(1), packed, -1)
        return packed

    def rest(self) -> None:
        """Let keys and values become codes again, if they are to be."""
        if self and self.bits and not self.rests:
            self.fill(self.all_rows())

    def append(self, keys: Tensor, values: Tensor, positions: Sequence[Tensor], real: Sequence[Tensor] | None) -> None:
        """Add new tokens at the end of every segment.

        keys, values [rows, kv_heads, q, dim]; per row the positions of its new tokens and which of the q are real
        (None: all of them, in every row). Where they rest, single tokens join them there; several are not packed yet.
        """
        self.settle()
        if real is None and keys.shape[2] == 1 and self.rests:
            return self._append_coded(keys, values, torch.stack(list(positions)))
        if real is None and not self.rests and self._has_room(keys.shape[2]):
            return self._write(keys, values, torch.stack(list(positions)))
        grown = []
        for row, where in enumerate(positions):
            new_keys, new_values = (new[row] if real is None else new[row][:, real[row]] for new in (keys, values))
            heads = zip(self.row(row), new_keys, new_values, strict=True)
            grown.append([_joined(old, self._new(k, v, where)) for old, k, v in heads])
        self._lay(grown, GROWTH)

    def _append_coded(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        if not (self._has_room(1) and self.coded.has_room):
            self.fill(self.all_rows(), GROWTH, spare=GROUP)
        self.coded.append(keys[:, :, 0], values[:, :, 0])
        self._write(keys, values, positions)

    def _has_room(self, count: int) -> bool:
        return self._writable and all(used + count <= room for used, room in zip(self.lengths, self.room, strict=True))

    @property
    def _writable(self) -> bool:
        return torch.is_inference_mode_enabled() or not self.flat.positions.is_inference()

    def _new(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tokens:
        """Tokens of one head as they arrive: standing where they stood, nothing noted yet."""
        places = None if self.flat.places is None else positions
        notes = (
            None if self.flat.notes is None else self.flat.notes.new_zeros(len(positions), *self.flat.notes.shape[1:])
        )
        return Tokens(keys, values, positions, places, notes)

    def _write(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Put the same number of new tokens into the room of every segment."""
        count = positions.shape[1]
        slots = (self.ends[:, None] + torch.arange(count, device=keys.device)).flatten()
        where = positions[:, None].expand(-1, self.kv_heads, -1).reshape(-1)
        new = self._new(keys.reshape(-1, keys.shape[-1]), values.reshape(-1, values.shape[-1]), where)
        for buffer, part in zip(self.flat.parts, new.parts, strict=True):
            if buffer is not None:
                buffer.index_copy_(0, slots, part.to(buffer.dtype))
        self.lengths = [length + count for length in self.lengths]
        self.ends += count

    def mark_ends(self) -> None:
        """Note the first free slot of every segment on the device, so that decoding never waits for the host."""
        self.ends = torch.tensor([start + length for start, length in self.segments], device=self.flat.positions.device)

    @property
    def is_even(self) -> bool:
        """Every row and key head holds the same number of tokens."""
        return bool(self.lengths) and min(self.lengths) == max(self.lengths)

    def even(self) -> Tokens:
        """Everything as [rows, kv_heads, n, …]: views, except of keys and values that rest; only if `is_even`."""
        self.settle()
        tokens = self.flat.map(self.evenly)
        if not self.rests:
            return tokens
        keys, values = self.coded.numbers(slice(None))
        return replace(tokens, keys=keys, values=values)

    def evenly(self, part: Tensor) -> Tensor:
        """A view of one of the flat buffers as [rows, kv_heads, n, …]; only if `is_even`."""
        return part.view(self.rows, self.kv_heads, -1, *part.shape[1:])[:, :, : self.lengths[0]]

    def open(self) -> None:
        """Repack with one slot more than there are tokens in every segment, free for the next."""
        self.fill(self.all_rows(), spare=1)
        self.hole = self.ends
        self.firsts = torch.tensor(self.starts, device=self.ends.device)

    def swap_in(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put one token's key and value of every row and key head into the free slot of each segment.

        keys, values [rows, kv_heads, dim] -> all n + 1 of them as [rows, kv_heads, n + 1, dim] in no order
        """
        if self.hole is None or not self._writable:
            self.settle()
            self.open()
        both = (self.flat.keys, keys), (self.flat.values, values)
        for buffer, new in both:
            buffer.index_copy_(0, self.hole, new.flatten(0, 1).to(buffer.dtype))
        return tuple(buffer.view(self.rows, self.kv_heads, -1, buffer.shape[-1]) for buffer, _ in both)

    def settle(self) -> None:
        """Close the hole and put every segment in order of position."""
        if self.hole is None:
            return
        n = self.lengths[0]
        positions = self.flat.positions.index_fill(0, self.hole, NOWHERE).view(len(self.lengths), -1)
        order = (positions.argsort(1)[:, :n] + self.firsts[:, None]).flatten()
        packed = self.flat.map(lambda t: t[order])
        pieces = [packed.map(lambda t, i=i: t[i * n : (i + 1) * n]) for i in range(len(self.lengths))]
        self.fill([pieces[row * self.kv_heads : (row + 1) * self.kv_heads] for row in range(self.rows)])

    def pause(self) -> Paused:
        """What it takes to undo the next append or swap."""
        return Paused(self.lengths, self.hole)

    def resume(self, state: Paused) -> None:
        """Forget what was appended or swapped in since."""
        self.lengths = list(state.lengths)
        if self.hole is not state.hole:  # packed again since: in order, the free slots at the end
            self.hole = None
        self.mark_ends()
        if self.coded:
            self.coded.back_to(self.lengths)
            self.rest()

    def take(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed: beam search and batch selection."""
        were = [row * self.kv_heads + head for row in rows for head in range(self.kv_heads)]
        self.fill([self.row(row) for row in rows], were=were)

    def copy(self) -> LayerCache:
        self.settle()
        twin = copy.copy(self)
        if self:
            twin.fill(self.all_rows())
        return twin


def _joined(old: Tokens, new: Tokens) -> Tokens:
    pairs = zip(old.parts, new.parts, strict=True)
    return Tokens(*(None if a is None else torch.cat([a, b.to(a.dtype)]) for a, b in pairs))


def _bytes(*tensors: Tensor | None) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)
