"""Layers of which every row evicts one token for each new one (cache/evict_one.py).

A full KV head has one slot more than the budget. The tokens of a row that is not full lie in its first slots, and the
one after them is free; once it is full, the token that is evicted leaves the next free slot. All of this is known on
the device alone. Rows come first in every tensor, so the first rows are the beginning of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.kernels.dispatch import append_ragged, padded_attention
from kvkeep.kernels.torch.reference import decode_attention_with_logits, dense_attention
from kvkeep.storage.ragged import LayerKind, RaggedLayer
from kvkeep.types import NOTHING, PAD_POSITION, Tokens

STORED = {"token_positions", "rope_positions", "token_state"}  # with every token
CHANGED = {"lengths", "used", "free_slot", "token_state"}  # by a step, beside what is in the new tokens' slots


@dataclass(frozen=True)
class StepShape:
    """The shape of consecutive layers of one kind."""

    layers: Sequence[int]
    kind: LayerKind
    heads: int
    slots: int  # of a KV head
    full: int  # slots of a full KV head: the budget, and one
    state_width: int  # of the method's memory; 0: it has none
    placed: bool  # keys have RoPE positions of their own
    sinks: int  # whose keys move
    observed: bool  # the method needs logits


@dataclass
class StepRows:
    """What is known of every row, but for keys and values; NOTHING where the method does not need it."""

    active: Tensor  # [rows, 1] 1 where the row is in use
    lengths: Tensor  # [rows] tokens of text so far
    used: Tensor  # [rows, kv_heads] slots, that of the next token included
    free_slot: Tensor  # [rows, layers, kv_heads] of the next token
    token_positions: Tensor  # [rows, layers, kv_heads, slots]
    rope_positions: Tensor = NOTHING
    token_state: Tensor = NOTHING  # [rows, layers, kv_heads, slots, k]
    sink_keys: Tensor = NOTHING  # [rows, layers, kv_heads, sinks, dim] as admitted: no rounding error builds up
    sink_positions: Tensor = NOTHING  # [rows, sinks] those they have there
    logits: Tensor = NOTHING  # [rows, layers, heads, slots] of the last step

    @classmethod
    def free(cls, shape: StepShape, rows: int) -> StepRows:
        """Rows that are not in use."""

        def full(value: float, *size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((rows, *size), value, dtype=dtype, device=shape.kind.device)

        heads = len(shape.layers), shape.kind.kv_heads
        positions = [full(PAD_POSITION, *heads, shape.slots, dtype=torch.int32) for _ in range(1 + shape.placed)]
        made = cls(full(0, 1), full(0), full(1, heads[1]), full(0, *heads), *positions)
        if shape.state_width:
            made.token_state = full(0, *heads, shape.slots, shape.state_width, dtype=torch.float32)
        if shape.sinks:
            made.sink_keys = full(0, *heads, shape.sinks, shape.kind.key_dim, dtype=shape.kind.dtype)
            made.sink_positions = full(0, shape.sinks)
        if shape.observed:
            made.logits = full(float("-inf"), heads[0], shape.heads, shape.slots, dtype=torch.float32)
        return made

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        return {name: part for name, part in vars(self).items() if part is not NOTHING}


class StepBlock:
    """Some layers of all rows."""

    def __init__(self, shape: StepShape, rows: int) -> None:
        self._set_shape(shape, rows)
        self.keys, self.values = (
            [torch.zeros(size, dtype=shape.kind.dtype, device=shape.kind.device) for _ in shape.layers]
            for size in self._sizes(rows)
        )

    def _set_shape(self, shape: StepShape, rows: int) -> None:
        self.shape, self.rows = shape, StepRows.free(shape, rows)
        self.before = {name: part.clone() for name, part in self.rows.parts.items() if name in CHANGED}
        segments = torch.arange(rows * shape.kind.kv_heads, device=shape.kind.device)
        self.starts = (segments * shape.slots).view(rows, shape.kind.kv_heads)
        self.unchanged = torch.zeros_like(self.rows.active)

    def _sizes(self, rows: int) -> list[tuple[int, ...]]:
        """The shapes of a layer's keys and values."""
        kind = self.shape.kind
        return [(rows, kind.kv_heads, self.shape.slots, dim) for dim in (kind.key_dim, kind.value_dim)]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def grow(self, rows: int, slots: int) -> None:
        """Make room for more rows and slots, one layer after the other; tokens stay where they are."""
        before, undo = self.rows, self.before
        self._set_shape(replace(self.shape, slots=slots), rows)
        pairs = [(self.rows.parts[name], old) for name, old in before.parts.items()]
        for new, old in pairs + [(self.before[name], old) for name, old in undo.items()]:
            new[tuple(map(slice, old.shape))] = old
        for buffers, size in zip((self.keys, self.values), self._sizes(rows), strict=True):
            for layer, old in enumerate(buffers):
                buffers[layer] = old.new_zeros(size)
                buffers[layer][tuple(map(slice, old.shape))] = old

    # rows that come and go

    def put(self, row: int, layers: Sequence[RaggedLayer], length: int, source: int) -> None:
        """Copy the tokens of one row of a cache that has seen so many."""
        for name, free in StepRows.free(self.shape, 1).parts.items():
            self.rows.parts[name][row] = free[0]
        for number, layer in enumerate(layers):
            for name, part in layer.dense(source).parts.items():
                self._stored(row, number)[name][:, : part.shape[1]] = part
        held, rows, sinks = layers[0].row_lengths(source)[0], self.rows, self.shape.sinks
        rows.active[row], rows.lengths[row], rows.used[row], rows.free_slot[row] = 1, length, held + 1, held
        if sinks:
            rows.sink_keys[row] = torch.stack([keys[row, :, :sinks] for keys in self.keys])
            rows.sink_positions[row] = rows.rope_positions[row, 0, 0, :sinks]

    def _stored(self, row: int, number: int) -> dict[str, Tensor]:
        """One layer of one row, by the names of `Tokens`. [kv_heads, slots, …]"""
        mine = {name: part[row, number] for name, part in self.rows.parts.items() if name in STORED}
        return {"keys": self.keys[number][row], "values": self.values[number][row]} | mine

    def release(self, row: int) -> None:
        rows = self.rows
        rows.active[row], rows.lengths[row], rows.used[row], rows.free_slot[row] = 0, 0, 1, 0

    def take(self, row: int, held: int) -> list[list[Tokens]]:
        """Gather a row's tokens, so many of every KV head, in order of position. -> of each layer and KV head"""
        free = self.rows.free_slot[row][..., None]  # perhaps the one after the last
        positions = pad(self.rows.token_positions[row], (0, 1), value=PAD_POSITION)
        positions = positions.scatter(-1, free, PAD_POSITION)[..., : held + 1]
        order, taken = positions.argsort(-1)[..., :held], []
        for number, heads in enumerate(order):
            tokens = Tokens(**self._stored(row, number))
            taken.append([tokens[head][where] for head, where in enumerate(heads)])
        return taken

    def remember(self, rows: int) -> None:
        """Save what `undo` restores, before a step changes anything."""
        for name, part in self.before.items():
            part[:rows].copy_(self.rows.parts[name][:rows])

    def undo(self, rows: slice) -> None:
        """Take the last step of some rows back: the token that it evicted is still in its slot."""
        for name, part in self.before.items():
            self.rows.parts[name][rows] = part[rows]

    @property
    def changed(self) -> list[Tensor]:
        """What a step changes beside free slots, even if no row is in use."""
        state = [] if self.rows.token_state is NOTHING else [self.rows.token_state]
        return [self.rows.active, *state, *self.before.values()]

    # one step of the first rows

    def attend(self, number: int, rows: int, query: Tensor, key: Tensor, value: Tensor, *how: Any) -> Tensor:
        """Write the new tokens of a layer into their free slots, and attend. how: scale, softcap, sink_logits"""
        keys, values, used = self.keys[number][:rows], self.values[number][:rows], self.rows.used[:rows]
        where = self.starts[:rows], self.rows.free_slot[:rows, number], self.unchanged[:rows]
        append_ragged(keys.flatten(0, 2), values.flatten(0, 2), key, value, *where)
        logits = self.rows.logits[:rows, number] if self.shape.observed else None
        if used.device.type == "cpu":  # leave slots out that no row uses
            fewest, longest = map(int, used.aminmax())
            keys, values = keys[:, :, :longest], values[:, :, :longest]
            logits = None if logits is None else logits[..., :longest]
            if fewest == longest:
                return _dense_attention(query, keys, values, *how, logits)
        return padded_attention(query, keys, values, used, *how, logits)

    def insert(self, rows: int, numbers: slice) -> None:
        """Store what is known of the new tokens; their slots are free, so an interrupted pass loses nothing."""
        slot = self.rows.free_slot[:rows, numbers, :, None]
        where = self.rows.lengths[:rows, None, None, None].expand_as(slot).to(torch.int32)
        for positions in (self.rows.token_positions, self.rows.rope_positions):
            if positions is not NOTHING:
                positions[:rows, numbers].scatter_(-1, slot, where)
        if self.shape.state_width:
            index = slot[..., None].expand(*slot.shape, self.shape.state_width)
            self.rows.token_state[:rows, numbers].scatter_(-2, index, 0.0)

    @property
    def logits(self) -> Tensor:
        """[rows, layers, kv_heads, group, slots]"""
        if not self.shape.observed:
            return NOTHING
        return self.rows.logits.unflatten(2, (self.shape.kind.kv_heads, -1))

    def evict(self, rows: int, numbers: slice, slots: Tensor | None, token_state: Tensor) -> None:
        """Store the new token state, and free these slots where KV heads are full. slots [rows * layers, kv_heads]"""
        used, active = self.rows.used[:rows, None], self.rows.active[:rows, None]
        before = self.rows.free_slot[:rows, numbers]
        free = used if slots is None else torch.where(used < self.shape.full, used, slots.view_as(before))
        before.copy_(torch.where(active > 0, free, before))
        if self.shape.state_width:
            mine = self.rows.token_state[:rows, numbers]
            mine.copy_(token_state.view_as(mine))

    def advance(self, rows: int) -> None:
        """Count the tokens of a step."""
        used, active = self.rows.used[:rows], self.rows.active[:rows]
        self.rows.lengths[:rows] += active[:, 0]
        used.copy_((used + active).clamp_max(self.shape.full))

    def move_sinks(self, rows: slice, target: Tensor, rotations: Sequence[Any]) -> None:
        """Rotate the sinks' keys of some rows to these positions; rotations: of every layer. target [rows, sinks]"""
        sinks, by = self.shape.sinks, target - self.rows.sink_positions[rows]
        self.rows.rope_positions[rows, ..., :sinks] = target[:, None, None].to(torch.int32)
        for first, *rest in runs(range(len(rotations)), lambda number: id(rotations[number])):
            layers = slice(first, first + 1 + len(rest))
            if rotation := rotations[first]:
                rotated = rotation.rotate(self.rows.sink_keys[rows, layers], by[:, None, None])
                for number, keys in enumerate(self.keys[layers]):
                    keys[rows, :, :sinks] = rotated[:, number]


def _dense_attention(query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    """`padded_attention` where all slots are used. rest: scale, softcap, sink_logits, logits"""
    *how, logits_out = rest
    if logits_out is None:
        return dense_attention(query, keys, values, *how)
    output, logits = decode_attention_with_logits(query, keys, values, *how)
    logits_out.copy_(logits.detach().flatten(1, 2))
    return output


def runs(items: Iterable[int], kind: Callable[[int], Any]) -> list[list[int]]:
    """Consecutive items of one kind."""
    return [list(same) for _, same in groupby(items, kind)]
