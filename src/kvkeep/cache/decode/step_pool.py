"""A pool of sequences of one method and budget that evict one token for each new one (evict_one.py)."""

from __future__ import annotations

from kvkeep.cache.cache_state import CacheState
from kvkeep.cache.decode.evict_one import EvictOne, EvictOneRows
from kvkeep.cache.decode.policy import evict_one_rule
from kvkeep.cache.decode.runner import DecodePool, layer_kinds
from kvkeep.errors import CacheMisuse
from kvkeep.model.hf_cache import key_shape, query_heads


class StepPool(EvictOneRows, DecodePool):
    """A cache of many rows of one size, decoded one token at a time."""

    def __init__(self, like: CacheState) -> None:
        """like: a cache such as those it is for"""
        rule, model, kinds = evict_one_rule(like), like.model, layer_kinds(like.model, like.compressed_layers)
        assert rule is not None
        super().__init__(model, EvictOne(rule, kinds, query_heads(model), like.rotations, 0))
        self.rows, self.slots = 0, key_shape(model)[0] * (rule.tokens + 1)
        self.longest, self.allocated = rule.tokens + 1, set[int]()

    @property
    def nbytes(self) -> int:
        return self.steps.nbytes

    # the size of the pool, as `RowPool` has it

    @property
    def tokens(self) -> int:
        return self.rows * self.slots

    @property
    def unused(self) -> int:
        return (self.rows - len(self.allocated)) * self.slots

    largest_free = unused  # all rows are of one size

    def slots_of(self, tokens: int) -> int:
        """A row takes as many, however many tokens it will have."""
        return self.slots

    def slots_needed(self, cache: CacheState, room: int) -> int:
        return self.slots

    def grow(self, rows: int, tokens: int, longest: int) -> bool:
        """More rows, as many as fit into so many slots; those in use stay where they are. -> whether there are more"""
        before, self.rows = self.rows, max(self.rows, min(rows, tokens // self.slots))
        if self.rows > before:
            self.steps.grow(self.rows, self.longest)
        return self.rows > before

    def fits(self, cache: CacheState, room: int) -> bool:
        return len(self.allocated) < self.rows

    def admit(self, row: int, cache: CacheState, room: int) -> None:
        """Copy a cache of one row."""
        if row in self.allocated:
            raise CacheMisuse(f"row {row} is in use.")
        self.allocated.add(row)
        self.steps.put(row, cache.backend.store, cache.seen, 0)

    def release(self, row: int) -> None:
        self.allocated.remove(row)
        for block in self.steps.blocks:
            block.release(row)

    def complete(self, row: int, cache: CacheState, count: int) -> None:
        """Bring the cache of an admitted row to what it is after `count` decoded tokens: a step more is taken back."""
        if int(self.steps.blocks[0].rows.lengths[row]) > cache.seen + count:
            self.steps.undo(slice(row, row + 1), self.steps.blocks)
        store = cache.backend.store
        self.steps.fill(store, {row: store[self.compressed_layers[0]].lengths[0] + count})
        cache.append_decoded(count)
