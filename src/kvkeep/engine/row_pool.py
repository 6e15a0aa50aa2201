"""A preallocated pool for many sequences: each has a span of its own in one buffer per layer (storage/pool.py).

Sequences are admitted and released without moving each other. Where a row's tokens lie and how many there are is known
on the device alone, so a decode step of all rows can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.compress.method import STORAGE
from kvkeep.errors import CacheMisuse, UnsupportedModel
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter, execution_device, key_shape, layer_devices
from kvkeep.storage.free_list import FreeList
from kvkeep.storage.pool import QuantizedBuffer, RaggedBuffer

MEMORY_FRACTION = 0.8  # of free memory, for keys and values; forward passes need the rest


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


class RowPool(HFCacheAdapter):
    """A cache of many rows of any lengths, decoded one token at a time."""

    def __init__(self, model: Any, rows: int, tokens: int, longest: int, storage: str | None = None):
        """tokens: slots of each layer, over all rows and key heads; longest: tokens one key head may have

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
            i: kind(rows, kv_heads, tokens, dim, bits, model.dtype, device) for i, device in device_of.items()
        }
        self.layers_on: dict[torch.device, list[int]] = {}
        for i, device in device_of.items():
            self.layers_on.setdefault(device, []).append(i)
        self.slot_tables = {
            device: SlotTable.empty(len(layers), rows, kv_heads, tokens, device)
            for device, layers in self.layers_on.items()
        }
        self.table_of = {
            i: (self.slot_tables[device], self.layers_on[device].index(i)) for i, device in device_of.items()
        }
        self.free = {i: FreeList(tokens) for i in self.compressed_layers}
        self.allocated: dict[int, list[tuple[int, int]]] = {}  # row -> (start, size) of its span in every layer
        self.longest, self.active_rows = longest, rows

    @property
    def seen(self) -> int:
        return 1  # not empty; every row has position ids of its own

    def sizes(self, cache: Cache, layer: int, room: int) -> list[int]:
        """Slots each key head needs for a cache of one row and `room` more tokens."""
        return [self.slots(n + room) for n in cache.backend.store[layer].row_lengths(0)]

    def fits(self, cache: Cache, room: int) -> bool:
        """Whether there is space now for a cache of one row and `room` more tokens per key head."""
        return self.could_fit(cache, room) and all(
            self.free[i].largest >= sum(self.sizes(cache, i, room)) for i in self.compressed_layers
        )

    def could_fit(self, cache: Cache, room: int) -> bool:
        """Whether there would be space in an empty pool."""
        layers = self.compressed_layers
        longest = max(max(cache.backend.store[i].row_lengths(0)) for i in layers) + room
        return longest <= self.longest and all(sum(self.sizes(cache, i, room)) <= self.tokens for i in layers)

    def admit(self, row: int, cache: Cache, room: int) -> None:
        """Copy a cache of one row, with space for `room` more tokens."""
        if row in self.allocated:
            raise CacheMisuse(f"row {row} is in use.")
        self.allocated[row] = []
        starts, lengths = {}, {i: cache.backend.store[i].row_lengths(0) for i in self.compressed_layers}
        for i in self.compressed_layers:
            sizes = self.sizes(cache, i, room)
            start = self.free[i].allocate(sum(sizes))
            self.allocated[row].append((start, sum(sizes)))
            *starts[i], _ = accumulate(sizes, initial=start)
            self.buffers[i].put(row, starts[i], cache.backend.store[i])
        for device, layers in self.layers_on.items():
            table = self.slot_tables[device]
            table.starts[:, row] = torch.tensor([starts[i] for i in layers]).to(device)
            table.lengths[:, row] = torch.tensor([lengths[i] for i in layers]).to(device)
            table.active[row] = 1

    def release(self, row: int) -> None:
        for i, (start, size) in zip(self.compressed_layers, self.allocated.pop(row), strict=True):
            self.free[i].free(start, size)
        for table in self.slot_tables.values():
            table.starts[:, row], table.lengths[:, row], table.active[row] = self.tokens, 0, 0

    @contextmanager
    def graph_capture_scratch(self, rows: int) -> Iterator[None]:
        """Within, forward passes change nothing: no row is in use."""
        self.set_active_rows(rows)
        saved = [(table, [part.clone() for part in table.parts]) for table in self.slot_tables.values()]
        for table, _ in saved:
            table.starts.fill_(self.tokens), table.lengths.zero_(), table.active.zero_()
        try:
            yield
        finally:
            for table, parts in saved:
                for part, before in zip(table.parts, parts, strict=True):
                    part.copy_(before)

    def set_active_rows(self, rows: int) -> None:
        """The next forward passes are of the first `rows` rows."""
        self.active_rows = rows

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """One token for every row; rows not in use write to an unused slot."""
        table, layer = self.table_of[index]
        parts = table.starts[layer], table.lengths[layer], table.active
        starts, lengths, active = (part[: self.active_rows] for part in parts)
        buffer, how = self.buffers[index], (call.scale, call.softcap, call.sink_logits)
        buffer.append(call.key, call.value, starts, lengths, active)
        return call.to_hf_output(buffer.attend(call.query, starts, lengths, self.longest, *how))


def slots_needed(cache: Cache, room: int) -> int:
    """Slots of the fullest layer for a cache of one row and `room` more tokens per key head."""
    kind = QuantizedBuffer if cache.bits else RaggedBuffer
    return max(sum(kind.slots(n + room) for n in layer.row_lengths(0)) for layer in cache.backend.store.values())


def row_bytes(model: Any, tokens: int, storage: str | None = None) -> int:
    """Bytes of a sequence of so many tokens per key head in a pool."""
    kind, (kv_heads, dim) = QuantizedBuffer if STORAGE[storage] else RaggedBuffer, key_shape(model)
    buffer = kind(1, kv_heads, kv_heads * kind.slots(tokens), dim, STORAGE[storage], model.dtype, "meta")
    return buffer.nbytes * model.config.get_text_config(decoder=True).num_hidden_layers


def free_host_bytes() -> int | None:
    """Available host memory; None where it is unknown."""
    with suppress(OSError):  # only Linux has this file
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, size = line.partition(":")
            if name == "MemAvailable":
                return int(size.split()[0]) * 1024
    return None


def free_device_bytes(device: torch.device) -> int | None:
    """Available memory of a GPU; None for other devices."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
