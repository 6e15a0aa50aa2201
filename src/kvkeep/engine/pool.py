"""Room for many sequences, made once: what each keeps lies in a stretch of its own of one flat buffer per layer.

Sequences come and go without moving each other. Where a row's tokens lie and how many there are is known on the device
alone, so a decode step of all rows can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.stretches import Stretches
from kvkeep.engine.session import Cache
from kvkeep.errors import CacheMisuse, UnsupportedModel
from kvkeep.kernels.reference import attend_ragged
from kvkeep.model.adapter import AdaptedCache, devices, key_shape
from kvkeep.model.attention import Handover


class Pool(AdaptedCache):
    """A cache of so many rows that are decoded one token at a time, each where it stands."""

    def __init__(self, model: Any, rows: int, tokens: int, longest: int):
        """tokens: slots of each layer, over all rows and key heads; longest: slots one head may have of them"""
        super().__init__(model)
        if len(self.owned) != len(self.layers):
            raise UnsupportedModel(f"{self.name} has sliding-window or linear layers, which a pool does not hold yet.")
        self.rows, self.tokens = rows, tokens
        kv_heads, dim = key_shape(model)
        place = devices(model)
        like = {i: {"dtype": model.dtype, "device": place.get(i, model.device)} for i in self.owned}
        self.keys = {i: torch.zeros(tokens + 1, dim, **like[i]) for i in self.owned}  # the last slot is nobody's
        self.values = {i: torch.zeros(tokens + 1, dim, **like[i]) for i in self.owned}
        ints = {i: {"dtype": torch.int64, "device": like[i]["device"]} for i in self.owned}
        self.starts = {i: torch.full((rows, kv_heads), tokens, **ints[i]) for i in self.owned}
        self.lengths = {i: torch.zeros(rows, kv_heads, **ints[i]) for i in self.owned}
        self.active = {i: torch.zeros(rows, 1, **ints[i]) for i in self.owned}
        self.free = {i: Stretches(tokens) for i in self.owned}
        self.taken: dict[int, list[tuple[int, int]]] = {}  # row -> its stretch in every layer
        self.longest, self.opened = longest, rows

    @property
    def seen(self) -> int:
        return 1  # more than nothing; where rows stand is told by their positions

    def fits(self, cache: Cache, room: int) -> bool:
        """Whether there is space now for what a cache kept and so many tokens more per key head."""
        return self.holds(cache, room) and all(self.free[i].largest >= _size(cache, i, room) for i in self.owned)

    def holds(self, cache: Cache, room: int) -> bool:
        """Whether there would be if nobody else was here."""
        most = max(max(cache.store[i].row_lengths(0)) for i in self.owned) + room
        return most <= self.longest and all(_size(cache, i, room) <= self.tokens for i in self.owned)

    def admit(self, row: int, cache: Cache, room: int) -> None:
        """Copy what a cache of one row kept."""
        if row in self.taken:
            raise CacheMisuse(f"row {row} is taken.")
        stretches = []
        for i in self.owned:
            start = self.free[i].take(size := _size(cache, i, room))
            stretches.append((start, size))
            for head, kept in enumerate(cache.store[i].row(0)):
                n = len(kept.keys)
                self.keys[i][start : start + n], self.values[i][start : start + n] = kept.keys, kept.values
                self.starts[i][row, head], self.lengths[i][row, head] = start, n
                start += n + room
            self.active[i][row] = 1
        self.taken[row] = stretches

    def release(self, row: int) -> None:
        for i, (start, size) in zip(self.owned, self.taken.pop(row), strict=True):
            self.free[i].give_back(start, size)
            self.starts[i][row], self.lengths[i][row], self.active[i][row] = self.tokens, 0, 0

    @contextmanager
    def rehearsal(self, rows: int) -> Iterator[None]:
        """Passes in here leave nothing behind: every row is as if free."""
        self.open(rows)
        kept = {i: (self.starts[i].clone(), self.lengths[i].clone(), self.active[i].clone()) for i in self.owned}
        for i in self.owned:
            self.starts[i].fill_(self.tokens), self.lengths[i].zero_(), self.active[i].zero_()
        try:
            yield
        finally:
            for i, parts in kept.items():
                for mine, before in zip((self.starts[i], self.lengths[i], self.active[i]), parts, strict=True):
                    mine.copy_(before)

    def open(self, rows: int) -> None:
        """The next passes are of the first so many rows."""
        self.opened = rows

    def attend(self, index: int, new: Handover) -> tuple[Tensor, Tensor | None]:
        """One token for every row; rows that are free write where nobody reads."""
        starts, lengths = self.starts[index][: self.opened], self.lengths[index][: self.opened]
        where = (starts + lengths).flatten()
        self.keys[index].index_copy_(0, where, new.key[:, :, 0].flatten(0, 1))
        self.values[index].index_copy_(0, where, new.value[:, :, 0].flatten(0, 1))
        lengths += self.active[index][: self.opened]
        output = attend_ragged(
            new.query, self.keys[index], self.values[index], starts, lengths, self.longest, new.scale, new.softcap,
            new.sinks,
        )  # fmt: skip
        return new.outcome(output)


def _size(cache: Cache, layer: int, room: int) -> int:
    return sum(length + room for length in cache.store[layer].row_lengths(0))
