"""A pool of sequences of one method and budget that evict every so many decoded tokens: a buffered schedule.

Between two evictions a row only appends, in the captured steps of all rows. Its tokens are in the pool alone, and so
are its newest queries, which the method scores with. Where KV heads are treated alike, an eviction selects from all
layers at once and moves what is kept to the front of each span. For other methods it brings what is kept back to the
row's cache, which selects as it would have by itself, and admits it again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.cache.cache import Cache
from kvkeep.cache.decode.row_pool import RowPool
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import key_shape
from kvkeep.storage.rows import Rows
from kvkeep.storage.upload import upload
from kvkeep.types import NOTHING, PAD_POSITION, Softmax, Tokens


@dataclass
class BufferedRow:
    """A row that is in use."""

    cache: Cache  # counts the row's tokens, and holds none of them
    answer: int  # tokens it may decode
    held: dict[int, Tokens] = field(default_factory=dict)  # as it was admitted, but for keys and values, by layer
    lengths: dict[int, list[int]] = field(default_factory=dict)  # tokens of each KV head then
    new: int = 0  # tokens decoded since that its cache has counted
    queries: int = 0  # that are held of its newest tokens
    written: int = 0  # queries, those it was admitted with included
    decoded: int = 0  # tokens that its cache has not counted
    told: int = 0  # tokens that it has, of all that were decoded

    @property
    def backend(self) -> EvictingBackend:
        assert isinstance(self.cache.backend, EvictingBackend)
        return self.cache.backend

    @property
    def is_due(self) -> bool:
        return self.decoded > 0 and self.cache.tracker.is_due(0, self.decoded)


class BufferedPool(RowPool):
    """A cache of many rows that are evicted from one by one, between two steps of all."""

    mixed, moves = False, True

    def __init__(self, like: Cache) -> None:
        """like: a cache such as those it is for"""
        window = max(1, BufferedRow(like, 0).backend.query_buffer.observation_window)
        super().__init__(like.model, 1, 0, 1, window=window)
        most = like.budget + (like.method.schedule.every or 0) if isinstance(like.budget, int) else sys.maxsize
        self.most = most  # tokens of a row per KV head
        self.kv_heads = key_shape(like.model)[0]
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
        window = mine.backend.query_buffer
        window.merge_steps()
        known = {i: queries for (i, _), queries in window.queries.items()}
        mine.queries = mine.written = min((queries.shape[1] for queries in known.values()), default=0)
        for ring in self.rings.values() if known else ():
            ring.put(row, torch.stack([known[i][:, -mine.queries :] for i in ring.kinds]))
        for i, layer in mine.backend.store.items():
            mine.held[i] = replace(layer.dense(0), keys=NOTHING, values=NOTHING)
            layer.clear()

    def _tell(self, row: int, count: int) -> dict[int, Tensor]:
        """Have a row's cache count what it has decoded. -> the newest queries of every layer [heads, q, dim]"""
        mine = self.used[row]
        mine.cache.append_decoded(count, lambda _: None)
        mine.new, mine.decoded, mine.told = mine.new + count, 0, mine.told + count
        mine.written += count
        mine.queries = min(self.window, mine.queries + count)
        return self.newest_queries(row, mine.written, mine.queries)

    def _tokens(self, row: int, index: int) -> tuple[Tokens, list[int]]:
        """All tokens of a row, once its cache has counted them, [kv_heads, longest, …], and each KV head's number."""
        mine, buffer = self.used[row], self.buffers[index]
        assert isinstance(buffer, Rows)  # nothing is quantized
        before, new, device = mine.lengths[index], mine.new, buffer.keys.device
        lengths, held = [n + new for n in before], mine.held[index]
        slots = self.places[index].starts[row][:, None] + torch.arange(max(lengths), device=device)
        slots = slots.clamp_max(len(buffer.keys) - 1)
        seen = mine.cache.seen
        fresh = torch.arange(seen - new, seen, dtype=held.token_positions.dtype, device=device).expand(len(before), -1)
        if len(set(before)) == 1:
            positions = torch.cat([held.token_positions, fresh], 1)
        else:
            ends = upload(before, device)[:, None] + torch.arange(new, device=device)
            positions = pad(held.token_positions, (0, new), value=PAD_POSITION).scatter(1, ends, fresh)
        state = None if held.token_state is None else pad(held.token_state, (0, 0, 0, new))
        return Tokens(buffer.keys[slots], buffer.values[slots], positions, None, state), lengths

    def complete(self, row: int, cache: Cache, count: int) -> None:
        """Move a row's tokens back to its cache, as it is after `count` decoded tokens."""
        queries = self._tell(row, count - self.used[row].told)
        if not cache.tracker.is_due(0, 0) or self._evict_in_place(row, queries):
            self.used[row].backend.fill_decoded(lambda i: self._tokens(row, i), queries)
        else:
            self._evict_to_cache(row, queries)
        del self.used[row]

    def _evict_to_cache(self, row: int, queries: dict[int, Tensor]) -> None:
        """Fill a row's cache with what it keeps."""
        mine = self.used[row]
        mine.backend.evict_decoded(lambda i: self._tokens(row, i), queries, self.how, mine.cache.seen)
        mine.cache.tracker.count_evicted([True])

    def _evict_in_place(self, row: int, queries: dict[int, Tensor]) -> bool:
        """Select from all layers as from one, if their KV heads are alike, and evict here. -> whether they are"""
        mine, layers = self.used[row], self.compressed_layers
        before = {n for lengths in mine.lengths.values() for n in lengths}
        how = self._one_softmax() if mine.backend.evictor.treats_heads_alike and len(before) == 1 else None
        if how is None:
            return False
        held, count = self._spans(row), before.pop() + mine.new
        places = torch.stack([mine.held[i].token_positions for i in layers]).flatten(0, 1)
        seen, like = mine.cache.seen, places
        fresh = torch.arange(seen - mine.new, seen, dtype=like.dtype, device=like.device).expand(len(like), -1)
        keys, values = (torch.stack([part[:, :count] for part in parts]).flatten(0, 1) for parts in held)
        tokens = Tokens(keys, values, torch.cat([places, fresh], 1))
        selection = mine.backend.select_decoded(torch.cat(list(queries.values())), tokens, how, seen)
        if selection is None:
            return False
        kept = tokens[torch.arange(len(like), device=like.device)[:, None], selection.index]
        kept = kept.map(lambda part: part.unflatten(0, (len(layers), -1)))
        most = selection.lengths[0]
        for parts, stays in zip(held, (kept.keys, kept.values), strict=True):
            for part, new in zip(parts, stays, strict=True):
                part[:, :most] = new
        (table,) = self.tables.values()
        table[1, :, row] = most
        mine.held = {i: Tokens(NOTHING, NOTHING, each) for i, each in zip(layers, kept.token_positions, strict=True)}
        mine.lengths, mine.new = dict.fromkeys(layers, [most] * self.kv_heads), 0
        mine.cache.tracker.count_evicted([True])
        return True

    def _one_softmax(self) -> Softmax | None:
        """The softmax of all layers as of one; None where they differ, or are on several devices."""
        scales, caps, sinks = zip(*(self.how[i] for i in self.compressed_layers), strict=True)
        learned = [each for each in sinks if each is not None]
        if len(self.tables) > 1 or len({*zip(scales, caps, strict=True)}) > 1 or len(learned) not in (0, len(sinks)):
            return None
        return scales[0], caps[0], torch.cat(learned) if learned else None

    def _spans(self, row: int) -> tuple[list[Tensor], list[Tensor]]:
        """Views of a row's keys and of its values, by layer, with all slots. [kv_heads, slots, dim]"""
        parts = [slice(start, start + size) for start, size in self.allocated[row]]
        rows = list(zip(self.buffers.values(), parts, strict=True))
        keys, values = ([getattr(each, name)[part] for each, part in rows] for name in ("keys", "values"))
        by_head = partial(torch.unflatten, dim=0, sizes=(self.kv_heads, -1))
        return list(map(by_head, keys)), list(map(by_head, values))

    def release(self, row: int) -> None:
        """Free a row. Its cache is emptied, unless it was completed."""
        super().release(row)
        if mine := self.used.pop(row, None):
            mine.cache.reset()

    def begin_step(self) -> bool:
        """Evict from the rows whose buffers are full. -> whether the pool's buffers were replaced, too"""
        grown = [self._evict(row, mine) for row, mine in list(self.used.items()) if mine.is_due]
        for mine in self.used.values():
            mine.decoded += 1
        return any(grown)

    def _evict(self, row: int, mine: BufferedRow) -> bool:
        queries = self._tell(row, mine.decoded)
        if self._evict_in_place(row, queries):
            return False
        self._evict_to_cache(row, queries)
        super().release(row)
        room = self.room_for(mine.cache, mine.answer)
        grown = not self.fits(mine.cache, room) and self._grow_for(mine.cache, room)
        self.admit(row, mine.cache, mine.answer)
        self.used[row].told = mine.told
        return grown

    def _grow_for(self, cache: Cache, room: int) -> bool:
        longest = 1 << (cache.longest_head + room - 1).bit_length()
        return self.grow(self.rows, self.tokens + self.slots_needed(cache, room), max(longest, self.longest))

    # one step

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        self.how[index] = call.how
        return super().attend(index, call)
