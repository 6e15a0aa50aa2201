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
from kvkeep.cache.decode.row_pool import RowPool
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.model.hf_attention import AttentionCall
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
    decoded: int = 0  # tokens that its cache has not counted
    told: int = 0  # tokens that it has, of all that were decoded

    @property
    def backend(self) -> EvictingBackend:
        assert isinstance(self.cache.backend, EvictingBackend)
        return self.cache.backend

    @property
    def ends(self) -> dict[int, int]:
        """Tokens of its first KV head, by layer, as far as its cache has counted them."""
        return {i: lengths[0] + self.new for i, lengths in self.lengths.items()}

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
        mine.queries = min((queries.shape[1] for queries in known.values()), default=0)
        if mine.queries:
            for i, slots in self.query_slots(mine.ends, mine.queries).items():
                self.newest[i][row, slots] = known[i][:, -mine.queries :].transpose(0, 1)
        for i, layer in mine.backend.store.items():
            mine.held[i] = replace(layer.dense(0), keys=NOTHING, values=NOTHING)
            layer.clear()

    def _tell(self, row: int, count: int) -> dict[int, Tensor]:
        """Have a row's cache count what it has decoded. -> the newest queries of every layer [heads, q, dim]"""
        mine = self.used[row]
        mine.cache.append_decoded(count, lambda _: None)
        mine.new, mine.decoded, mine.told = mine.new + count, 0, mine.told + count
        mine.queries = min(self.window, mine.queries + count)
        return self.newest_queries(row, mine.ends, mine.queries) if mine.queries else {}

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
        self.how[index] = call.how
        return super().attend(index, call)
