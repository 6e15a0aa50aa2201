"""Room for many sequences, made once: what each keeps lies in a stretch of its own of one buffer per layer (rooms.py).

Sequences come and go without moving each other. Where a row's tokens lie and how many there are is known on the device
alone, so a decode step of all rows can be captured in a CUDA graph and replayed.
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
from kvkeep.model.hf_attention import Handover
from kvkeep.model.hf_cache import AdaptedCache, devices, key_shape, runs_on
from kvkeep.storage.free_list import Stretches
from kvkeep.storage.pool import Plain, Quantised

SHARE = 0.8  # of free memory, for keys and values; passes need the rest


@dataclass(frozen=True)
class Places:
    """Where the tokens of those layers lie that are on one device."""

    starts: Tensor  # [layers, rows, kv_heads]
    lengths: Tensor  # [layers, rows, kv_heads]
    active: Tensor  # [rows, 1] 1 where the row is taken

    @classmethod
    def empty(cls, layers: int, rows: int, kv_heads: int, nowhere: int, device: Any) -> Places:
        kind = {"dtype": torch.int64, "device": device}
        shape = layers, rows, kv_heads
        return cls(torch.full(shape, nowhere, **kind), torch.zeros(shape, **kind), torch.zeros(rows, 1, **kind))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.starts, self.lengths, self.active


class Pool(AdaptedCache):
    """A cache of so many rows that are decoded one token at a time, each where it stands."""

    def __init__(self, model: Any, rows: int, tokens: int, longest: int, storage: str | None = None):
        """tokens: slots of each layer, over all rows and key heads; longest: tokens one head may have of them

        storage: as in `Cache`
        """
        super().__init__(model)
        if len(self.owned) != len(self.layers):
            raise UnsupportedModel(f"{self.name} has sliding-window or linear layers, which a pool does not hold yet.")
        kv_heads, dim = key_shape(model)
        place = devices(model)
        at = {i: place.get(i, runs_on(model)) for i in self.owned}
        kind = Quantised if (bits := STORAGE[storage]) else Plain
        self.rows, self.tokens, self.slots = rows, tokens, kind.slots
        self.rooms = {i: kind(rows, kv_heads, tokens, dim, bits, model.dtype, at[i]) for i in self.owned}
        self.together = {device: [i for i in self.owned if at[i] == device] for device in at.values()}
        self.places = {
            device: Places.empty(len(layers), rows, kv_heads, tokens, device)
            for device, layers in self.together.items()
        }
        self.place = {i: (self.places[at[i]], self.together[at[i]].index(i)) for i in self.owned}
        self.free = {i: Stretches(tokens) for i in self.owned}
        self.taken: dict[int, list[tuple[int, int]]] = {}  # row -> its stretch in every layer
        self.longest, self.opened = longest, rows

    @property
    def seen(self) -> int:
        return 1  # more than nothing; where rows stand is told by their positions

    def sizes(self, cache: Cache, layer: int, room: int) -> list[int]:
        """Slots each key head needs for what a cache of one row kept, and so many tokens more."""
        return [self.slots(n + room) for n in cache.store[layer].row_lengths(0)]

    def fits(self, cache: Cache, room: int) -> bool:
        """Whether there is space now for what a cache kept and so many tokens more per key head."""
        return self.holds(cache, room) and all(
            self.free[i].largest >= sum(self.sizes(cache, i, room)) for i in self.owned
        )

    def holds(self, cache: Cache, room: int) -> bool:
        """Whether there would be if nobody else was here."""
        most = max(max(cache.store[i].row_lengths(0)) for i in self.owned) + room
        return most <= self.longest and all(sum(self.sizes(cache, i, room)) <= self.tokens for i in self.owned)

    def admit(self, row: int, cache: Cache, room: int) -> None:
        """Copy what a cache of one row kept."""
        if row in self.taken:
            raise CacheMisuse(f"row {row} is taken.")
        self.taken[row] = []
        starts, lengths = {}, {i: cache.store[i].row_lengths(0) for i in self.owned}
        for i in self.owned:
            sizes = self.sizes(cache, i, room)
            start = self.free[i].take(sum(sizes))
            self.taken[row].append((start, sum(sizes)))
            *starts[i], _ = accumulate(sizes, initial=start)
            self.rooms[i].put(row, starts[i], cache.store[i])
        for device, layers in self.together.items():
            place = self.places[device]
            place.starts[:, row] = torch.tensor([starts[i] for i in layers]).to(device)
            place.lengths[:, row] = torch.tensor([lengths[i] for i in layers]).to(device)
            place.active[row] = 1

    def release(self, row: int) -> None:
        for i, (start, size) in zip(self.owned, self.taken.pop(row), strict=True):
            self.free[i].give_back(start, size)
        for place in self.places.values():
            place.starts[:, row], place.lengths[:, row], place.active[row] = self.tokens, 0, 0

    @contextmanager
    def rehearsal(self, rows: int) -> Iterator[None]:
        """Passes in here leave nothing behind: every row is as if free."""
        self.open(rows)
        kept = [(place, [part.clone() for part in place.parts]) for place in self.places.values()]
        for place, _ in kept:
            place.starts.fill_(self.tokens), place.lengths.zero_(), place.active.zero_()
        try:
            yield
        finally:
            for place, parts in kept:
                for mine, before in zip(place.parts, parts, strict=True):
                    mine.copy_(before)

    def open(self, rows: int) -> None:
        """The next passes are of the first so many rows."""
        self.opened = rows

    def attend(self, index: int, new: Handover) -> tuple[Tensor, Tensor | None]:
        """One token for every row; rows that are free write where nobody reads."""
        place, layer = self.place[index]
        starts, lengths, active = (t[: self.opened] for t in (place.starts[layer], place.lengths[layer], place.active))
        room = self.rooms[index]
        room.append(new.key, new.value, starts, lengths, active)
        return new.outcome(room.attend(new.query, starts, lengths, self.longest, new.scale, new.softcap, new.sinks))


def slots_of(cache: Cache, room: int) -> int:
    """Slots of the fullest layer for what a cache of one row kept, and so many tokens more per key head."""
    kind = Quantised if cache.bits else Plain
    return max(sum(kind.slots(n + room) for n in layer.row_lengths(0)) for layer in cache.store.values())


def row_bytes(model: Any, tokens: int, storage: str | None = None) -> int:
    """What a sequence of so many tokens per key head takes in a pool."""
    kind, (kv_heads, dim) = Quantised if STORAGE[storage] else Plain, key_shape(model)
    room = kind(1, kv_heads, kv_heads * kind.slots(tokens), dim, STORAGE[storage], model.dtype, "meta")
    return room.nbytes * model.config.get_text_config(decoder=True).num_hidden_layers


def host_bytes() -> int | None:
    """What the host has left; None where nobody can say."""
    with suppress(OSError):  # elsewhere than on Linux there is no such file
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, size = line.partition(":")
            if name == "MemAvailable":
                return int(size.split()[0]) * 1024
    return None


def free_bytes(device: torch.device) -> int | None:
    """What a device has left; None where nobody can say."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
