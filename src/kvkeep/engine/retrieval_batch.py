"""Decoding from a `RetrievalPool`: requests of one retrieval method and budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvkeep.cache.cache import Cache
from kvkeep.cache.decode.retrieval_pool import RetrievalPool
from kvkeep.cache.decode.retrieval_rows import RowSizes
from kvkeep.engine.memory import MemoryCap
from kvkeep.engine.pooled_batch import USUAL_ANSWER, PooledBatch
from kvkeep.engine.request import Request
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.model.hf_cache import context_length

SLOTS_FRACTION = 0.25  # of the memory a pool may use, for units that were fetched before
MOST_SLOTS = 16  # for each unit that the budget leaves to a layer


class RetrievalBatch(PooledBatch):
    """No step is launched ahead: a cache that is kept must not have seen one token more."""

    pool: Any

    def __init__(self, like: Cache, max_rows: int, max_tokens: int | None, memory: MemoryCap | None) -> None:
        super().__init__(like.model, None, max_rows, max_tokens, memory, RetrievalPool(like))
        self.lag = 0

    @property
    def _byte_limit(self) -> int:
        return self._slot_limit() * self._slot_bytes

    def can_hold(self, request: Request) -> bool:
        """Whether it would fit into an empty pool."""
        sizes = self.pool.sizes_for(request.sequence.cache, request.how.max_new_tokens)
        return self.pool.row_bytes(self.pool.sizes.max(_rounded(sizes))) <= self._byte_limit

    def _has_memory(self, request: Request, waiting: Iterable[Request]) -> bool:
        cache, room = request.sequence.cache, request.how.max_new_tokens
        if not self.pool.fits(cache, room):
            rows = len(self.by_row) + 1 + len(list(waiting))
            rows = 1 << (rows - 1).bit_length() if self.on_gpu else rows  # as many as will be captured
            sizes = self.pool.sizes.max(_rounded(self.pool.sizes_for(cache, room)))
            self._grow(min(self.max_rows, rows), len(self.by_row) + 1, sizes)
        return self.pool.fits(cache, room)

    def _grow(self, rows: int, least: int, sizes: RowSizes) -> None:
        """So many rows of this size, or as many as memory allows, unless these are fewer than `least`."""
        limit, shape, small = self._byte_limit, self.pool.plan.shape, sizes._replace(slots=self.pool.plan.shape.most)
        rows = max(self.pool.rows, min(rows, limit // self.pool.row_bytes(small)))
        if rows < least:
            return
        if self.on_gpu:  # units that were fetched stay as long as there is memory: they may be selected again
            slot_bytes = self.pool.row_bytes(small._replace(slots=shape.most + 1)) - self.pool.row_bytes(small)
            most = MOST_SLOTS * (self.pool.plan.quota_limit // shape.unit)
            slots = min(most, sizes.units, int(SLOTS_FRACTION * limit) // (rows * slot_bytes))
            small = small._replace(slots=max(shape.most, slots))
        if self.pool.grow(rows, small):
            self.runner.graphs.clear()  # they have the old buffers

    def _grow_for(self, config: SequenceConfig, rows: int) -> None:
        """Make room for texts as long as the model takes, if half the memory suffices."""
        plan, tokens = self.pool.plan, context_length(self.model)

        def sizes() -> RowSizes:
            blocks = tokens // (plan.config.window or tokens) + 8
            near = max(plan.budget, plan.sizes.near + plan.shape.unit) + USUAL_ANSWER
            return _rounded(RowSizes(near, tokens // plan.shape.unit, blocks, plan.shape.most))

        while tokens > 2 * plan.budget and 2 * rows * self.pool.row_bytes(sizes()) > self._byte_limit:
            tokens //= 2
        self._grow(rows, 1, self.pool.sizes.max(sizes()))
        self.pool.capture_offloader()

    @property
    def replays(self) -> bool:
        return super().replays and self.pool.offloader is not None


def _rounded(sizes: RowSizes) -> RowSizes:
    """Up to an eighth more, so that a pool seldom grows."""

    def up(n: int) -> int:
        step = max(8, (1 << n.bit_length()) // 16)
        return -(-n // step) * step

    return RowSizes(up(sizes.near), up(sizes.units), up(sizes.blocks), sizes.slots)
