"""The choice of the batch that decodes a request."""

from __future__ import annotations

from typing import Any

from kvkeep.cache.cache import Cache
from kvkeep.cache.step_pool import StepPool, step_rule
from kvkeep.engine.decode_batch import DecodeBatch
from kvkeep.engine.held_requests import HeldRequests
from kvkeep.engine.independent_batch import IndependentBatch
from kvkeep.engine.memory import MemoryCap
from kvkeep.engine.pooled_batch import PooledBatch, can_pool
from kvkeep.engine.request import Request
from kvkeep.engine.retrieval_batch import RetrievalBatch
from kvkeep.engine.retrieval_pool import retrieval_plan
from kvkeep.engine.sequence import Sequence
from kvkeep.model.hf_cache import execution_device

INDEPENDENT, POOLED, STEPS, RETRIEVAL = "independent", "pooled", "steps", "retrieval"  # families of batches


class Batches:
    """Makes a batch of a kind when the first request needs it."""

    def __init__(self, model: Any, held: HeldRequests, max_tokens: int | None, cap: MemoryCap | None) -> None:
        """max_tokens: as in `PooledBatch`"""
        self.model, self.held, self.cap = model, held, cap
        self.pool_sizes = held.max_rows, max_tokens, cap

    def batch_for(self, request: Request) -> DecodeBatch:
        cache = request.sequence.cache
        batch = self._batch(self._kind(request.sequence), cache)
        moves_keys = can_pool(request.sequence) and not cache.make_room(request.how.max_new_tokens)
        if moves_keys or isinstance(batch, RetrievalBatch) and not batch.can_hold(request):
            return self._batch(INDEPENDENT, cache)
        return batch

    def _batch(self, kind: str, cache: Cache) -> DecodeBatch:
        batches = self.held.batches
        if kind not in batches:
            batches[kind] = self._new_batch(kind, cache)
        return batches[kind]

    def _kind(self, sequence: Sequence) -> str:
        """Some pools are of one method and budget; without graphs, several share forward passes instead."""
        cache = sequence.cache
        if can_pool(sequence):
            return f"{POOLED} {cache.storage}"
        family = STEPS if step_rule(cache) else RETRIEVAL if retrieval_plan(cache) else INDEPENDENT
        kind = f"{family} {cache.method} {cache.budget}"
        if family == INDEPENDENT or (execution_device(self.model).type != "cuda" and self._others_busy(kind, family)):
            return INDEPENDENT
        return kind

    def _others_busy(self, kind: str, family: str) -> bool:
        idle = self.held.idle
        return any(name.startswith(family) and name not in (kind, *idle) for name in self.held.batches)

    def _new_batch(self, kind: str, cache: Cache) -> DecodeBatch:
        family = kind.split()[0]
        if family == INDEPENDENT:
            return IndependentBatch(self.model, self.held.max_rows, self.cap)
        if family == POOLED:
            return PooledBatch(self.model, cache.storage, *self.pool_sizes)
        for idle in [name for name in self.held.idle if name.startswith(family)]:
            del self.held.batches[idle]  # its memory is needed
        if family == RETRIEVAL:
            return RetrievalBatch(cache, *self.pool_sizes)
        return PooledBatch(self.model, cache.storage, *self.pool_sizes, StepPool(cache))
