"""A preallocated pool for many sequences: each has a span of its own in one buffer per layer (storage/pool.py).

Sequences are admitted and released without moving each other. Where a row's tokens lie and how many there are is known
on the device alone, so a decode step of all rows can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.cache.decode_pool import DecodePool
from kvkeep.compress.method import STORAGE
from kvkeep.errors import CacheMisuse, UnsupportedModel
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import execution_device, key_shape, layer_devices
from kvkeep.storage.free_list import FreeList
from kvkeep.storage.pool import QuantizedBuffer, RaggedBuffer, new_buffer
from kvkeep.storage.upload import upload


@dataclass(frozen=True)
class SlotTable:
    """Where tokens lie, for the layers on one device."""

    starts: Tensor  # [layers, rows, kv_heads]
    lengths: Tensor  # [layers, rows, kv_heads]
    active: Tensor  # [rows, 1] 1 where the row is in use

    @classmethod
    def empty(cls, layers: int, rows: int, kv_heads: int, unused: int, device: Any) -> SlotTable:
        kind = {"dtype": torch.int64, "device": device}
        shape = layers, rows, kv_heads
        return cls(torch.full(shape, unused, **kind), torch.zeros(shape, **kind), torch.zeros(rows, 1, **kind))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.starts, self.lengths, self.active


class RowPool(DecodePool):
    """A cache of many rows of any lengths, decoded one token at a time."""

    mixed = True  # rows of any methods and budgets

    def __init__(self, model: Any, rows: int, tokens: int, longest: int, storage: str | None = None):
        """tokens: slots of each layer, over all rows and KV heads; longest: tokens one KV head may have

        storage: as in `Cache`
        """
        super().__init__(model)
        if len(self.compressed_layers) != len(self.layers):
            raise UnsupportedModel(f"{self.name} has sliding-window or linear layers, which a pool does not hold yet.")
        kv_heads, dim = key_shape(model)
        devices = layer_devices(model)
        device_of = {i: devices.get(i, execution_device(model)) for i in self.compressed_layers}
        kind = QuantizedBuffer if (bits := STORAGE[storage]) else RaggedBuffer
        self.rows, self.tokens, self.slots = rows, tokens, kind.slots
        self.buffers = {
            i: new_buffer(rows, kv_heads, tokens, dim, bits, model.dtype, device) for i, device in device_of.items()
        }
        self.layers_on: dict[torch.device, list[int]] = {}
        for i, device in device_of.items():
            self.layers_on.setdefault(device, []).append(i)
        self.free = {i: FreeList(tokens) for i in self.compressed_layers}
        self.allocated: dict[int, list[tuple[int, int]]] = {}  # row -> (start, size) of its span in every layer
        self.room: dict[int, int] = {}  # row -> tokens it may decode
        self.longest, self.active_rows = longest, rows
        self._init_tables(kv_heads)

    def _init_tables(self, kv_heads: int) -> None:
        self.slot_tables = {
            device: SlotTable.empty(len(layers), self.rows, kv_heads, self.tokens, device)
            for device, layers in self.layers_on.items()
        }
        self.table_of = {
            i: (self.slot_tables[device], number)
            for device, layers in self.layers_on.items()
            for number, i in enumerate(layers)
        }

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def room_for(self, cache: Cache, answer: int) -> int:
        """Tokens per KV head that a cache needs room for, beside its own, for an answer of so many."""
        return answer

    def slots_of(self, tokens: int) -> int:
        """Slots of a row of so many tokens per KV head, where all KV heads have as many."""
        return tokens * key_shape(self.model)[0]

    def slots_needed(self, cache: Cache, room: int) -> int:
        """Slots of the fullest layer for a cache of one row and `room` more tokens per KV head."""
        return max(sum(self.sizes(cache, i, room)) for i in self.compressed_layers)

    def grow(self, rows: int, tokens: int, longest: int) -> bool:
        """Make room for more, one layer after the other; admitted rows stay where they are. -> whether there is more"""
        if (rows, tokens, longest) == (self.rows, self.tokens, self.longest):
            return False
        for i, buffer in self.buffers.items():
            buffer.grow(rows, tokens)
            if tokens > self.tokens:
                self.free[i].free(self.tokens, tokens - self.tokens)
        self.rows, self.tokens, self.longest, before = rows, tokens, longest, self.slot_tables
        self._init_tables(next(iter(before.values())).starts.shape[2])
        used = sorted(self.allocated)
        for device, table in self.slot_tables.items():
            for new, old in zip(table.parts[:2], before[device].parts[:2], strict=True):
                new[:, used] = old[:, used]
            table.active[used] = 1
        return True

    def sizes(self, cache: Cache, layer: int, room: int) -> list[int]:
        """Slots each KV head needs for a cache of one row and `room` more tokens."""
        return [self.slots(n + room) for n in cache.backend.store[layer].row_lengths(0)]

    def fits(self, cache: Cache, room: int) -> bool:
        """Whether there is space now for a cache of one row and `room` more tokens per KV head."""
        return self.could_fit(cache, room) and all(
            self.free[i].largest >= sum(self.sizes(cache, i, room)) for i in self.compressed_layers
        )

    def could_fit(self, cache: Cache, room: int) -> bool:
        """Whether there would be space in an empty pool."""
        return cache.longest_head + room <= self.longest and self.slots_needed(cache, room) <= self.tokens

    def admit(self, row: int, cache: Cache, room: int) -> None:
        """Copy a cache of one row, with space for `room` more tokens."""
        if row in self.allocated:
            raise CacheMisuse(f"row {row} is in use.")
        self.allocated[row], self.room[row] = [], room
        starts, lengths = {}, {i: cache.backend.store[i].row_lengths(0) for i in self.compressed_layers}
        for i in self.compressed_layers:
            sizes = self.sizes(cache, i, room)
            start = self.free[i].allocate(sum(sizes))
            self.allocated[row].append((start, sum(sizes)))
            *starts[i], _ = accumulate(sizes, initial=start)
        for device, layers in self.layers_on.items():
            table = self.slot_tables[device]
            table.starts[:, row] = upload([starts[i] for i in layers], device)
            table.lengths[:, row] = upload([lengths[i] for i in layers], device)
            table.active[row] = 1
        for i, (table, number) in self.table_of.items():
            self.buffers[i].put(row, starts[i], table.starts[number, row], cache.backend.store[i])

    def complete(self, row: int, cache: Cache, count: int) -> None:
        """Append the first `count` tokens a row has decoded to the cache it was admitted from."""
        sizes = {i: self.sizes(cache, i, self.room[row]) for i in self.compressed_layers}
        starts = dict(zip(self.compressed_layers, (start for start, _ in self.allocated[row]), strict=True))

        def decoded(i: int) -> None:
            layer = cache.backend.store[i]
            positions = torch.arange(cache.seen, cache.seen + count, dtype=torch.int32, device=layer.ends.device)
            *first, _ = accumulate(sizes[i], initial=starts[i])
            self.buffers[i].copy_decoded(row, first, layer, positions)

        cache.append_decoded(count, decoded)

    def release(self, row: int) -> None:
        for i, (start, size) in zip(self.compressed_layers, self.allocated.pop(row), strict=False):  # or cut short
            self.free[i].free(start, size)
        for table in self.slot_tables.values():
            table.starts[:, row], table.lengths[:, row], table.active[row] = self.tokens, 0, 0

    @contextmanager
    def graph_capture_scratch(self, rows: int) -> Iterator[None]:
        """Within, forward passes change nothing: no row is in use."""
        self.active_rows = rows
        saved = [(table, [part.clone() for part in table.parts]) for table in self.slot_tables.values()]
        for table, _ in saved:
            table.starts.fill_(self.tokens), table.lengths.zero_(), table.active.zero_()
        try:
            yield
        finally:
            for table, parts in saved:
                for part, before in zip(table.parts, parts, strict=True):
                    part.copy_(before)

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """One token for every row; rows not in use write to an unused slot."""
        table, layer = self.table_of[index]
        parts = table.starts[layer], table.lengths[layer], table.active
        starts, lengths, active = (part[: self.active_rows] for part in parts)
        buffer, how = self.buffers[index], call.how
        buffer.append(call.key, call.value, starts, lengths, active)
        return call.to_hf_output(buffer.attend(call.query, starts, lengths, self.longest, *how))
