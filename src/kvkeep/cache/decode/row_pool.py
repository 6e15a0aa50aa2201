"""A preallocated pool for many sequences: each has spans of its own in one buffer per layer (storage/rows.py).

Sequences are admitted and released without moving each other, and a decode step of all rows appends and attends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.decode.runner import DecodePool, layer_kinds
from kvkeep.compress.method import STORAGE
from kvkeep.errors import CacheMisuse, UnsupportedModel
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import key_shape, query_heads
from kvkeep.storage.places import FreeList, Places
from kvkeep.storage.ragged import LayerKind
from kvkeep.storage.rows import QuantizedRows, Rows, new_rows, restored, span_size
from kvkeep.storage.upload import upload

Segments = Sequence[tuple[int, int]]  # (first slot, length)


class QueryRing:
    """The newest queries of every row, of the layers on one device: a row's slots are written in turn."""

    def __init__(self, kinds: Mapping[int, LayerKind], rows: int, window: int, heads: int) -> None:
        """kinds: of the layers; window: queries of a row that are read; there is one slot more for a step too many"""
        self.kinds, self.heads, self.size = dict(kinds), heads, window + 1
        kind = next(iter(kinds.values()))
        shape = len(kinds), rows, self.size + 1, heads, kind.key_dim  # the last slot is written by rows not in use
        self.queries = torch.zeros(shape, dtype=kind.dtype, device=kind.device)
        self.written = torch.zeros(rows, dtype=torch.int64, device=kind.device)  # so many, or the next one's position
        self.rows = torch.arange(rows, device=kind.device)
        self.slots = self.written  # of the step under way

    @property
    def nbytes(self) -> int:
        return self.queries.nbytes

    def grow(self, rows: int) -> QueryRing:
        """A ring of more rows, with what this one holds."""
        larger = QueryRing(self.kinds, rows, self.size - 1, self.heads)
        larger.queries[:, : len(self.rows)] = self.queries
        larger.written[: len(self.rows)] = self.written
        return larger

    def put(self, row: int, queries: Tensor, seen: int) -> None:
        """Write the queries of the newest of `seen` tokens. [layers, heads, count, dim]"""
        self.queries[:, row, self._slots(seen, queries.shape[2])] = queries.transpose(1, 2)
        self.written[row] = seen

    def _slots(self, written: int, count: int) -> Tensor:
        """Where the last `count` queries are."""
        return upload([(written - count + j) % self.size for j in range(count)], self.rows.device)

    def write(self, index: int, query: Tensor, active: Tensor) -> None:
        """Write the queries of one step to a layer. query [rows, heads, 1, dim]; active [rows, 1]: rows in use"""
        number, rows = list(self.kinds).index(index), len(query)
        if not number:
            self.slots = torch.where(active[:, 0] > 0, self.written[:rows] % self.size, self.size)
        if number == len(self.kinds) - 1:
            self.written[:rows] += active[:, 0]
        self.queries[number, self.rows[:rows], self.slots] = query[:, :, 0].to(self.queries.dtype)

    def newest(self, row: int, written: int, count: int) -> Tensor:
        """The last `count` of the queries that a row has written, oldest first. [layers, heads, count, dim]"""
        return self.queries[:, row, self._slots(written, count)].transpose(1, 2)


class RowPool(DecodePool):
    """A cache of many rows of any lengths, decoded one token at a time."""

    mixed = True  # rows of any methods and budgets

    def __init__(
        self, model: Any, rows: int, tokens: int, longest: int, storage: str | None = None, window: int = 0
    ) -> None:
        """tokens: slots of each layer, over all rows and KV heads; longest: tokens one KV head may have

        storage: as in `Cache`; window: the newest queries of every row that are kept, where somebody asks for them
        """
        super().__init__(model)
        if len(self.compressed_layers) != len(self.layers):
            raise UnsupportedModel(f"{self.name} has sliding-window or linear layers, which a pool does not hold yet.")
        kinds, self.bits = layer_kinds(model, self.compressed_layers), STORAGE[storage]
        self.kv_heads = key_shape(model)[0]
        self.rows, self.tokens, self.longest, self.window = rows, tokens, longest, window
        self.buffers: Mapping[int, Rows | QuantizedRows]
        self.buffers = {i: new_rows(kind, rows, tokens, self.bits) for i, kind in kinds.items()}
        self.layers_on: dict[torch.device, list[int]] = {}
        for i, kind in kinds.items():
            self.layers_on.setdefault(kind.device, []).append(i)
        self.free = {i: FreeList(tokens) for i in self.compressed_layers}
        self.allocated: dict[int, list[tuple[int, int]]] = {}  # row -> (start, size) of its span in every layer
        self.room: dict[int, int] = {}  # row -> tokens it may decode
        heads = query_heads(model)
        self.rings = {
            device: QueryRing({i: kinds[i] for i in layers}, rows, window, heads)
            for device, layers in self.layers_on.items()
            if window
        }
        self._init_places()

    def _init_places(self) -> None:
        """Make empty places; those of all layers on one device are in one tensor."""
        self.places: dict[int, Places] = {}
        self.tables: dict[torch.device, Tensor] = {}  # starts and lengths [2, layers, rows, kv_heads]
        for device, layers in self.layers_on.items():
            table = torch.zeros(2, len(layers), self.rows, self.kv_heads, dtype=torch.int64, device=device)
            active = torch.zeros(self.rows, 1, dtype=torch.int64, device=device)
            table[0] = self.tokens
            self.tables[device] = table
            starts, lengths = table
            self.places |= {i: Places(starts[n], lengths[n], active) for n, i in enumerate(layers)}

    @property
    def nbytes(self) -> int:
        buffers = sum(buffer.nbytes for buffer in self.buffers.values())
        return buffers + sum(ring.nbytes for ring in self.rings.values())

    # the size of the pool

    @property
    def unused(self) -> int:
        """Slots of each layer that no row has."""
        return min(free.size for free in self.free.values())

    @property
    def largest_free(self) -> int:
        """The most slots that no row has and that lie one behind the other, in each layer."""
        return min(free.largest for free in self.free.values())

    def slots_of(self, tokens: int) -> int:
        """Slots of a row of so many tokens per KV head, where all KV heads have as many."""
        return tokens * self.kv_heads

    def slots_needed(self, cache: Any, room: int) -> int:
        """Slots of the fullest layer for a cache of one row and `room` more tokens per KV head."""
        return max(sum(self._sizes(layer.row_lengths(0), room)) for layer in cache.backend.store.values())

    def _sizes(self, lengths: Sequence[int], room: int) -> list[int]:
        """Slots each KV head needs for so many tokens and `room` more."""
        return [span_size(n + room, self.bits) for n in lengths]

    def grow(self, rows: int, tokens: int, longest: int) -> bool:
        """Make room for more, one layer after the other; admitted rows stay where they are. -> whether there is more"""
        if (rows, tokens, longest) == (self.rows, self.tokens, self.longest):
            return False
        for i, buffer in self.buffers.items():
            buffer.grow(rows, tokens)
            if tokens > self.tokens:
                self.free[i].free(self.tokens, tokens - self.tokens)
        self.rows, self.tokens, self.longest = rows, tokens, longest
        tables, used = self.tables, sorted(self.allocated)
        self._init_places()
        for device, before in tables.items():
            self.tables[device][:, :, used] = before[:, :, used]
            self.places[self.layers_on[device][0]].active[used] = 1
        self.rings = {device: ring.grow(rows) for device, ring in self.rings.items()}
        return True

    def fits(self, cache: Any, room: int) -> bool:
        """Whether there is space now for a cache of one row and `room` more tokens per KV head."""
        return cache.longest_head + room <= self.longest and all(
            self.free[i].largest >= sum(self._sizes(layer.row_lengths(0), room))
            for i, layer in cache.backend.store.items()
        )

    # rows that come and go

    def admit(self, row: int, cache: Any, room: int) -> None:
        """Copy a cache of one row, with space for `room` more tokens."""
        store = cache.backend.store
        self.put(row, store, {i: store[i].segments for i in self.compressed_layers}, room)

    def put(self, row: int, store: Mapping[int, Any], segments: Mapping[int, Segments], room: int) -> None:
        """Copy segments of layers to this row and those after it, with space for `room` more tokens.

        segments: first slot and length of every KV head of one row after the other
        """
        count = len(segments[self.compressed_layers[0]]) // self.kv_heads
        rows = slice(row, row + count)
        starts = self._allocate(row, count, segments, room)
        for device, layers in self.layers_on.items():
            active = self.places[layers[0]].active
            first = [[start for start, _ in segments[i]] for i in layers]
            lengths = [[n for _, n in segments[i]] for i in layers]
            ends = [[start + n for start, n in segments[i]] for i in layers]
            numbers = upload([[starts[i] for i in layers], lengths, first, ends], device)
            self.tables[device][:, :, rows] = numbers[:2].unflatten(2, (count, -1))
            active[rows] = 1
            if self.window:
                self.rings[device].written[rows] = 0
            for number, i in enumerate(layers):
                target, _, *source = numbers[:, number]
                self.buffers[i].put(row, starts[i], target, store[i], (*source, sum(lengths[number])))

    def _allocate(self, row: int, count: int, segments: Mapping[int, Segments], room: int) -> dict[int, list[int]]:
        """Allocate a span for each of `count` rows. -> where the tokens of every row and KV head begin, by layer"""
        starts: dict[int, list[int]] = {i: [] for i in self.compressed_layers}
        for each in range(row, row + count):
            if each in self.allocated:
                raise CacheMisuse(f"row {each} is in use.")
            self.allocated[each], self.room[each] = [], room
        for i in self.compressed_layers:
            heads = len(segments[i]) // count
            for number in range(count):
                mine = segments[i][number * heads : (number + 1) * heads]
                sizes = self._sizes([n for _, n in mine], room)
                start = self.free[i].allocate(sum(sizes))
                self.allocated[row + number].append((start, sum(sizes)))
                starts[i] += list(accumulate(sizes, initial=start))[:-1]
        return starts

    def complete(self, row: int, cache: Any, count: int) -> None:
        """Append the first `count` tokens a row has decoded to the cache it was admitted from."""
        for i, (start, _) in zip(self.compressed_layers, self.allocated[row], strict=True):
            layer, buffer = cache.backend.store[i], self.buffers[i]
            positions = torch.arange(cache.seen, cache.seen + count, dtype=torch.int32, device=buffer.kind.device)
            *first, _ = accumulate(self._sizes(layer.row_lengths(0), self.room[row]), initial=start)
            buffer.copy_decoded(row, first, layer, positions)
        cache.append_decoded(count)

    def release(self, row: int) -> None:
        for i, (start, size) in zip(self.compressed_layers, self.allocated.pop(row), strict=False):  # or cut short
            self.free[i].free(start, size)
        for device, layers in self.layers_on.items():
            starts, lengths = self.tables[device]
            starts[:, row] = self.tokens
            lengths[:, row] = 0
            self.places[layers[0]].active[row] = 0

    # a step

    @contextmanager
    def graph_capture_scratch(self) -> Iterator[None]:
        """Within, forward passes change nothing: no row is in use."""
        active = [self.places[layers[0]].active for layers in self.layers_on.values()]
        with restored([*self.tables.values(), *active]):
            for starts, lengths in self.tables.values():
                starts.fill_(self.tokens)
                lengths.zero_()
            for part in active:
                part.zero_()
            yield

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """One token for every row; rows not in use write to an unused slot."""
        if self.window:
            ring = self.rings[self.buffers[index].kind.device]
            ring.write(index, call.query, self.places[index].active[: len(call.query)])
        step = call.query, call.key, call.value, self.places[index], self.longest
        return call.to_hf_output(self.buffers[index].step(*step, *call.how, *self.lse_out(index)))

    def lse_out(self, index: int) -> tuple[Any, ...]:
        """Where attention writes its queries' log-sum-exps, for a pool that needs them: an argument, or none."""
        return ()

    def newest_queries(self, row: int, written: int, count: int) -> dict[int, Tensor]:
        """The last `count` of the queries that a row has written, by layer. [heads, count, dim]"""
        rings = self.rings.values()
        return {i: mine for ring in rings for i, mine in zip(ring.kinds, ring.newest(row, written, count), strict=True)}
