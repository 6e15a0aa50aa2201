"""A pool of sequences of one method and budget that evict every so many decoded tokens: a buffered schedule.

Between two evictions a row only appends, in the captured steps of all rows. Its tokens are in the pool alone. An
eviction brings what is kept back to the row's cache, which selects as it would have by itself, and admits it again. The
pool also holds the newest queries of every row, which the method scores with.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.cache.cache import Cache
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.engine.row_pool import RowPool
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import query_heads
from kvkeep.storage.pool import RaggedBuffer
from kvkeep.storage.upload import upload
from kvkeep.types import NOTHING, PAD_POSITION, Softmax, Tokens


def can_buffer(cache: Cache) -> bool:
    """Whether its decode steps only append, but for an eviction every so many of them."""
    backend, method = cache.backend, cache.method
    if not isinstance(backend, EvictingBackend) or cache.hf_layers or cache.bits or cache.shards:
        return False
    if method.scorer is None or (method.schedule.every or 1) == 1 or method.placement or method.summary:
        return False
    return method.memory is None or getattr(method.memory, "prompt_only", False)


@dataclass
class BufferedRow:
    """A row that is in use."""

    cache: Cache  # counts the row's tokens, and holds none of them
    answer: int  # tokens it may decode
    held: dict[int, Tokens] = field(default_factory=dict)  # as it was admitted, but for keys and values, by layer
    lengths: dict[int, list[int]] = field(default_factory=dict)  # tokens of each KV head then
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


class BufferedPool(RowPool):
    """A cache of many rows that are evicted from one by one, between two steps of all."""

    mixed, moves = False, True

    def __init__(self, like: Cache) -> None:
        """like: a cache such as those it is for"""
        super().__init__(like.model, 1, 0, 1)
        most = like.budget + (like.method.schedule.every or 0) if isinstance(like.budget, int) else sys.maxsize
        self.most = most  # tokens of a row per KV head
        self.window = max(1, BufferedRow(like, 0).backend.query_buffer.observation_window)
        self.used: dict[int, BufferedRow] = {}
        self.how: dict[int, Softmax] = {}
        self._init_queries()

    def _init_queries(self) -> None:
        """Slots for a row's newest queries, for one of a step too many, and for those of rows that are not in use."""
        self.newest: dict[int, Tensor] = {}  # layer -> [rows, window + 2, heads, dim]
        for i in self.compressed_layers:
            keys = self._buffer(i).keys
            self.newest[i] = keys.new_zeros(self.rows, self.window + 2, query_heads(self.model), keys.shape[1])

    def _buffer(self, index: int) -> RaggedBuffer:
        buffer = self.buffers[index]
        assert isinstance(buffer, RaggedBuffer)  # nothing is quantized
        return buffer

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(queries.nbytes for queries in self.newest.values())

    def grow(self, rows: int, tokens: int, longest: int) -> bool:
        more, before = super().grow(rows, tokens, longest), self.newest
        if more:
            self._init_queries()
            for i, queries in before.items():
                self.newest[i][: len(queries)] = queries
        return more

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
        mine.queries = min((queries.shape[1] for queries in known.values()), default=0)
        for i, slots in self._query_slots(row).items():
            self.newest[i][row, slots] = known[i][:, -mine.queries :].transpose(0, 1)
        for i, layer in mine.backend.store.items():
            mine.held[i] = replace(layer.dense(0), keys=NOTHING, values=NOTHING)
            layer.clear()

    def _query_slots(self, row: int) -> dict[int, Tensor]:
        """The slots of the newest queries of a row whose cache has counted all its tokens, by layer. [queries]"""
        mine, size = self.used[row], self.window + 1
        if not (count := mine.queries):
            return {}
        ends = [mine.lengths[i][0] + mine.new for i in self.newest]
        slots = [[(end - count + j) % size for j in range(count)] for end in ends]
        at = {device: upload(slots, device) for device in self.slot_tables}
        return {i: at[queries.device][number] for number, (i, queries) in enumerate(self.newest.items())}

    def _tell(self, row: int, count: int) -> dict[int, Tensor]:
        """Have a row's cache count what it has decoded. -> the newest queries of every layer [heads, q, dim]"""
        mine = self.used[row]
        mine.cache.append_decoded(count, lambda _: None)
        mine.new, mine.decoded, mine.told = mine.new + count, 0, mine.told + count
        mine.queries = min(self.window, mine.queries + count)
        return {i: self.newest[i][row, slots].transpose(0, 1) for i, slots in self._query_slots(row).items()}

    def _tokens(self, row: int, index: int) -> tuple[Tokens, list[int]]:
        """All tokens of a row, once its cache has counted them, [kv_heads, longest, …], and each KV head's number."""
        mine, buffer, (table, number) = self.used[row], self._buffer(index), self.table_of[index]
        before, new, device = mine.lengths[index], mine.new, buffer.keys.device
        lengths, held = [n + new for n in before], mine.held[index]
        slots = table.starts[number, row][:, None] + torch.arange(max(lengths), device=device)
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
        if cache.tracker.is_due(0, 0):
            self._evict_from(row, queries)
        else:
            self.used[row].backend.fill_decoded(lambda i: self._tokens(row, i), queries)
        del self.used[row]

    def _evict_from(self, row: int, queries: dict[int, Tensor]) -> None:
        """Fill a row's cache with what it keeps."""
        mine = self.used[row]
        mine.backend.evict_decoded(lambda i: self._tokens(row, i), queries, self.how, mine.cache.seen)
        mine.cache.tracker.count_evicted([True])

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
        self._evict_from(row, self._tell(row, mine.decoded))
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
        """Append and attend like a `RowPool`, and write the queries beside."""
        self.how[index] = call.how
        table, number = self.table_of[index]
        rows, size = self.active_rows, self.window + 1
        active, lengths = table.active[:rows, 0], table.lengths[number, :rows, 0]
        slots = torch.where(active > 0, lengths % size, size)
        every = torch.arange(rows, device=slots.device)
        self.newest[index][every, slots] = call.query[:, :, 0].to(self.newest[index].dtype)
        return super().attend(index, call)
