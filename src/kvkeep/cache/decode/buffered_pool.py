"""A pool of sequences of one method and budget that evict every so many decoded tokens: a buffered schedule.

Between two evictions a row only appends, in the captured steps of all rows. Its tokens are in the pool alone, and so
are its newest queries, which the method scores with. Where layers decide by themselves, an eviction selects from many
layers at once and moves what is kept within the row's spans; the host does not wait for it. For other methods it brings
what is kept back to the row's cache, which selects as it would have by itself, and admits it again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.cache.cache import Cache
from kvkeep.cache.decode.row_pool import RowPool
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.compress.budget.heads import AdaptiveHeads, EqualHeads
from kvkeep.compress.budget.layers import EqualLayers
from kvkeep.compress.method import Method
from kvkeep.compress.pipeline import PlacedSelection
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.storage.rows import Rows
from kvkeep.storage.upload import Download, upload
from kvkeep.types import NOTHING, PAD_POSITION, Softmax, Tokens

TOGETHER = 2**28  # bytes of keys and values that are gathered for one selection


@dataclass(frozen=True)
class Kept:
    """What an eviction left of a row in some layers; the host has not asked for the lengths yet."""

    layers: Sequence[int]
    positions: Tensor  # [total] of the tokens, KV head by KV head
    counts: Tensor  # [layers * kv_heads]
    on_host: Any  # the counts, when they have come

    def by_layer(self) -> Iterator[tuple[int, list[int], Tensor]]:
        """-> layer, tokens of each KV head, their positions [kv_heads, longest]"""
        lengths, device = self.on_host(), self.counts.device
        longest, each = max(lengths), len(lengths) // len(self.layers)
        index = torch.arange(longest, device=device)
        places = ((self.counts.cumsum(0) - self.counts)[:, None] + index).clamp_max(len(self.positions) - 1)
        positions = self.positions[places].masked_fill(index >= self.counts[:, None], PAD_POSITION)
        for number, i in enumerate(self.layers):
            mine = slice(number * each, (number + 1) * each)
            yield i, lengths[mine], positions[mine, : max(lengths[mine])]


@dataclass
class BufferedRow:
    """A row that is in use."""

    cache: Cache  # counts the row's tokens, and holds none of them
    answer: int  # tokens it may decode
    held: dict[int, Tokens] = field(default_factory=dict)  # as it was last evicted, but for keys and values, by layer
    lengths: dict[int, list[int]] = field(default_factory=dict)  # tokens of each KV head then
    kept: list[Kept] = field(default_factory=list)  # what will take the place of `held` and `lengths`
    new: int = 0  # tokens decoded since that its cache has counted
    queries: int = 0  # that are held of its newest tokens
    decoded: int = 0  # tokens that its cache has not counted
    told: int = 0  # tokens that it has, of all that were decoded

    @property
    def backend(self) -> EvictingBackend:
        assert isinstance(self.cache.backend, EvictingBackend)
        return self.cache.backend

    @property
    def is_due(self) -> bool:
        return self.decoded > 0 and self.cache.tracker.is_due(0, self.decoded)

    def settle(self) -> None:
        """Ask for the lengths that the last eviction left."""
        for part in self.kept:
            for i, lengths, positions in part.by_layer():
                self.held[i], self.lengths[i] = Tokens(NOTHING, NOTHING, positions), lengths
        self.kept = []


class BufferedPool(RowPool):
    """A cache of many rows that are evicted from one by one, between two steps of all."""

    mixed, moves = False, True
    buffers: Mapping[int, Rows]  # nothing is quantized

    def __init__(self, like: Cache) -> None:
        """like: a cache such as those it is for"""
        window = max(1, BufferedRow(like, 0).backend.query_buffer.observation_window)
        super().__init__(like.model, 1, 0, 1, window=window)
        most = like.budget + (like.method.schedule.every or 0) if isinstance(like.budget, int) else sys.maxsize
        self.most = most  # tokens of a row per KV head
        self.in_place = _decides_by_layer(like.method)
        self.used: dict[int, BufferedRow] = {}
        self.how: dict[int, Softmax] = {}

    def room_for(self, cache: Cache, answer: int) -> int:
        """Until it is evicted from, a row has no more than the budget and the buffer."""
        tracker = cache.tracker
        more = tracker.budget.tokens(cache.seen + answer) - tracker.kept[0]
        return min(answer, (tracker.schedule.every or 0) + max(0, more))

    def slots_of(self, tokens: int) -> int:
        """Slots of a row that will have so many tokens per KV head if nothing is evicted."""
        return super().slots_of(min(tokens, self.most))

    # one row

    def admit(self, row: int, cache: Cache, answer: int) -> None:
        """Move keys and values of a cache of one row here, with space for those it decodes between two evictions."""
        super().admit(row, cache, self.room_for(cache, answer))
        lengths = {i: layer.row_lengths(0) for i, layer in cache.backend.store.items()}
        self.used[row] = mine = BufferedRow(cache, answer, lengths=lengths)
        known = {i: queries for (i, _), queries in mine.backend.query_buffer.queries.items()}
        mine.queries = min((queries.shape[1] for queries in known.values()), default=0)
        for ring in self.rings.values():
            ring.written[row] = cache.seen
            if known:
                ring.put(row, torch.stack([known[i][:, -mine.queries :] for i in ring.kinds]), cache.seen)
        for i, layer in mine.backend.store.items():
            mine.held[i] = replace(layer.dense(0), keys=NOTHING, values=NOTHING)
            layer.clear()

    def _tell(self, row: int, count: int) -> dict[int, Tensor]:
        """Have a row's cache count what it has decoded. -> the newest queries of every layer [heads, q, dim]"""
        mine = self.used[row]
        mine.settle()
        mine.cache.append_decoded(count)
        mine.new, mine.decoded, mine.told = mine.new + count, 0, mine.told + count
        mine.queries = min(self.window, mine.queries + count)
        return self.newest_queries(row, mine.cache.seen, mine.queries)

    def _tokens(self, row: int, layers: Sequence[int]) -> tuple[Tokens, list[int]]:
        """A row's tokens in layers of one device, once its cache has counted them, and each KV head's number.

        [layers * kv_heads, longest, …]
        """
        mine, device = self.used[row], self.buffers[layers[0]].kind.device
        before, new, seen = [n for i in layers for n in mine.lengths[i]], mine.new, mine.cache.seen
        longest = max(before) + new
        starts = torch.stack([self.places[i].starts[row] for i in layers])
        slots = (starts[..., None] + torch.arange(longest, device=device)).clamp_max(self.tokens)
        keys, values = (
            torch.stack([getattr(self.buffers[i], name)[mine] for i, mine in zip(layers, slots, strict=True)])
            for name in ("keys", "values")
        )
        held = [mine.held[i] for i in layers]
        positions = [each.token_positions for each in held]
        fresh = torch.arange(seen - new, seen, dtype=positions[0].dtype, device=device).expand(len(before), -1)
        if min(before) == max(before):
            places = torch.cat([torch.cat(positions), fresh], 1)
        else:
            ends = upload(before, device)[:, None] + torch.arange(new, device=device)
            padded = [pad(each, (0, longest - each.shape[1]), value=PAD_POSITION) for each in positions]
            places = torch.cat(padded).scatter(1, ends, fresh)
        state = held[0].token_state  # methods that have some are evicted from layer by layer
        state = None if state is None else pad(state, (0, 0, 0, new))
        return Tokens(keys.flatten(0, 1), values.flatten(0, 1), places, None, state), [n + new for n in before]

    def complete(self, row: int, cache: Cache, count: int) -> None:
        """Move a row's tokens back to its cache, as it is after `count` decoded tokens."""
        queries, is_due = self._tell(row, count - self.used[row].told), cache.tracker.is_due(0, 0)
        if is_due and self.in_place:
            self._evict_in_place(row, queries)
            self.used[row].settle()
        self._fill_cache(row, queries, evicts=is_due and not self.in_place)
        del self.used[row]

    def release(self, row: int) -> None:
        """Free a row. Its cache is emptied, unless it was completed."""
        super().release(row)
        if mine := self.used.pop(row, None):
            mine.cache.reset()

    # eviction

    def begin_step(self) -> bool:
        """Evict from the rows whose buffers are full. -> whether the pool's buffers were replaced, too"""
        grown = [self._evict(row, mine) for row, mine in list(self.used.items()) if mine.is_due]
        for mine in self.used.values():
            mine.decoded += 1
        return any(grown)

    def _evict(self, row: int, mine: BufferedRow) -> bool:
        queries = self._tell(row, mine.decoded)
        if self.in_place:
            self._evict_in_place(row, queries)
            return False
        self._fill_cache(row, queries, evicts=True)
        super().release(row)
        room, grown = self.room_for(mine.cache, mine.answer), False
        if not self.fits(mine.cache, room):
            longest = 1 << (mine.cache.longest_head + room - 1).bit_length()
            slots = self.tokens + self.slots_needed(mine.cache, room)
            grown = self.grow(self.rows, slots, max(longest, self.longest))
        self.admit(row, mine.cache, mine.answer)
        self.used[row].told = mine.told
        return grown

    def _fill_cache(self, row: int, queries: dict[int, Tensor], evicts: bool) -> None:
        """Fill a row's cache with its tokens, or with those of them that it keeps."""
        mine = self.used[row]
        mine.backend.fill_decoded(lambda i: self._tokens(row, [i]), queries, self.how, mine.cache.seen, evicts)
        mine.cache.tracker.count_evicted([evicts])

    @torch.no_grad()
    def _evict_in_place(self, row: int, queries: dict[int, Tensor]) -> None:
        """Evict within the row's spans, from many layers at once."""
        mine = self.used[row]
        for layers in self._alike(mine):
            tokens, lengths = self._tokens(row, layers)
            sinks = [learned for i in layers if (learned := self.how[i][2]) is not None]
            how = *self.how[layers[0]][:2], torch.cat(sinks) if sinks else None
            found = torch.cat([queries[i] for i in layers])
            kept = mine.backend.select_decoded(layers, found, tokens, lengths, how, mine.cache.seen)
            self._move(row, layers, tokens[tuple(kept.places)], kept)
        mine.new = 0
        mine.cache.tracker.count_evicted([True])

    def _alike(self, mine: BufferedRow) -> Iterator[list[int]]:
        """Consecutive layers of one device and softmax, as many as are gathered for one selection."""
        longest = max(max(lengths) for lengths in mine.lengths.values()) + mine.new
        shape = next(iter(self.buffers.values())).kind
        size = self.kv_heads * longest * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize
        most = max(1, TOGETHER // size)

        def kind(i: int) -> Any:
            scale, softcap, sinks = self.how[i]
            return self.buffers[i].kind.device, scale, softcap, sinks is None

        for _, same in groupby(self.compressed_layers, kind):
            layers = list(same)
            yield from (layers[first : first + most] for first in range(0, len(layers), most))

    def _move(self, row: int, layers: Sequence[int], tokens: Tokens, kept: PlacedSelection) -> None:
        """Write what is kept of some layers to the row's spans; the room left is shared by the KV heads equally.

        tokens [total, …], KV head by KV head; every layer keeps as many
        """
        numbers = [self.compressed_layers.index(i) for i in layers]
        firsts, sizes = zip(*(self.allocated[row][number] for number in numbers), strict=True)
        counts, each = kept.counts.view(len(layers), -1), len(tokens.keys) // len(layers)
        room = counts + min((size - each) // self.kv_heads for size in sizes)
        starts = upload(firsts, counts.device)[:, None] + room.cumsum(1) - room
        heads, before = kept.places[0], kept.counts.cumsum(0) - kept.counts
        within = torch.arange(len(heads), device=heads.device) - before[heads]
        slots = (starts.flatten()[heads] + within).view(len(layers), -1)
        keys, values = (part.unflatten(0, slots.shape) for part in (tokens.keys, tokens.values))
        for number, i in enumerate(layers):
            buffer, places = self.buffers[i], self.places[i]
            buffer.keys.index_copy_(0, slots[number], keys[number])
            buffer.values.index_copy_(0, slots[number], values[number])
            places.starts[row], places.lengths[row] = starts[number], counts[number]
        self.used[row].kept.append(Kept(layers, tokens.token_positions, kept.counts, Download(kept.counts)))

    # one step

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        self.how[index] = call.how
        return super().attend(index, call)


def _decides_by_layer(method: Method) -> bool:
    """Whether a layer's selection depends on its own tokens alone, and changes none of them."""
    changes = method.memory or method.placement or method.rerank
    equal = isinstance(method.layers, EqualLayers) and method.reuse == 1 and not changes
    heads = type(method.heads) in (EqualHeads, AdaptiveHeads)
    return equal and heads and replace(method, heads=EqualHeads()).per_head
