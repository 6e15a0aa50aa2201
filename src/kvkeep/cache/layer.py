"""One layer's keys and values: ragged over rows and key heads, in one flat buffer that holds nothing else.

Segments lie row by row, head by head. Room for growth is a 64th of a segment, so memory exceeds what is kept by at
most 1.6 %, and a decode step copies at most 64 tokens per head on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvkeep.types import NOWHERE

GROWTH = 64
Piece = tuple[Tensor, Tensor, Tensor]  # keys [n, dim], values [n, dim], positions [n] of one row and head


class LayerCache:
    """Sole owner of a layer's keys, values and positions."""

    def __init__(self) -> None:
        self.rows = 0
        self.kv_heads = 0
        self.keys = self.values = self.positions = torch.empty(0)
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.room: list[int] = []  # slots of each segment, used or not

    def __bool__(self) -> bool:
        return bool(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, measured on their storages."""
        return sum(t.untyped_storage().nbytes() for t in (self.keys, self.values)) if self else 0

    @property
    def index_nbytes(self) -> int:
        """Bytes of the positions that say where kept tokens stood."""
        return self.positions.untyped_storage().nbytes() if self else 0

    @property
    def token_nbytes(self) -> int:
        """Bytes one token takes in one key head."""
        return sum(t[0].nbytes for t in (self.keys, self.values) if len(t))

    def row_lengths(self, row: int) -> list[int]:
        """Tokens per key head of one row."""
        return self.lengths[row * self.kv_heads : (row + 1) * self.kv_heads]

    @property
    def segments(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, self.lengths, strict=True))

    def piece(self, row: int, head: int) -> Piece:
        """Views of one row's and head's keys, values and positions."""
        i = row * self.kv_heads + head
        used = slice(self.starts[i], self.starts[i] + self.lengths[i])
        return self.keys[used], self.values[used], self.positions[used]

    def pieces(self, row: int) -> Iterator[Piece]:
        return (self.piece(row, head) for head in range(self.kv_heads))

    def dense(self, row: int) -> Piece:
        """One row as [kv_heads, longest, …] tensors, shorter heads padded with position NOWHERE."""
        keys, values, positions = zip(*self.pieces(row), strict=True)
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(keys, True), pad(values, True), pad(positions, True, NOWHERE)

    def fill(self, rows: Sequence[Sequence[Piece]], growth: int = 0) -> None:
        """Replace everything by copies of these pieces, packed; growth=64 leaves each a 64th of room."""
        flat = [piece for row in rows for piece in row]
        lengths = [len(keys) for keys, _, _ in flat]
        room = [n + n // growth if growth else n for n in lengths]
        starts = [0, *torch.tensor(room).cumsum(0).tolist()]
        buffers = [like.new_empty(starts[-1], *like.shape[1:]) for like in flat[0]]
        for piece, start in zip(flat, starts, strict=False):
            for buffer, part in zip(buffers, piece, strict=True):
                buffer[start : start + len(part)] = part
        self.keys, self.values, self.positions = buffers
        self.rows, self.kv_heads = len(rows), len(rows[0])
        self.starts, self.lengths, self.room = starts[:-1], lengths, room

    def append(self, keys: Tensor, values: Tensor, positions: Sequence[Tensor], real: Sequence[Tensor] | None) -> None:
        """Add new tokens at the end of every segment.

        keys, values [rows, kv_heads, q, dim]; per row the positions of its new tokens and which of the q are real
        (None: all of them, in every row).
        """
        if real is None and self._has_room(keys.shape[2]):
            return self._write(keys, values, torch.stack(list(positions)))
        grown = []
        for row, where in enumerate(positions):
            new_keys, new_values = (new[row] if real is None else new[row][:, real[row]] for new in (keys, values))
            new = zip(new_keys, new_values, strict=True)
            grown.append([(cat(k, a), cat(v, b), cat(p, where)) for (k, v, p), (a, b) in zip(self.pieces(row), new, strict=True)])
        self.fill(grown, GROWTH)

    def _has_room(self, count: int) -> bool:
        return all(used + count <= room for used, room in zip(self.lengths, self.room, strict=True))

    def _write(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        count = positions.shape[1]
        ends = torch.tensor([s + n for s, n in self.segments], device=self.keys.device)
        slots = (ends[:, None] + torch.arange(count, device=ends.device)).flatten()
        self.keys.index_copy_(0, slots, keys.reshape(-1, keys.shape[-1]))
        self.values.index_copy_(0, slots, values.reshape(-1, values.shape[-1]))
        self.positions.index_copy_(0, slots, positions[:, None].expand(-1, self.kv_heads, -1).reshape(-1))
        self.lengths = [n + count for n in self.lengths]

    def take(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed: beam search and batch selection."""
        self.fill([list(self.pieces(row)) for row in rows])

    def copy(self) -> LayerCache:
        twin = LayerCache()
        if self:
            twin.fill([list(self.pieces(row)) for row in range(self.rows)])
        return twin


def cat(old: Tensor, new: Tensor) -> Tensor:
    return torch.cat([old, new.to(old.dtype)])
