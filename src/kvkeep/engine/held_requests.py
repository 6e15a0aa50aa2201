"""All requests of a scheduler, by how far they are, and the memory they hold."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from kvkeep.cache import draft_pool
from kvkeep.cache.report import format_bytes
from kvkeep.engine.decode_batch import DecodeBatch
from kvkeep.engine.fair_queue import FairQueue
from kvkeep.engine.memory import MemoryCap, row_bytes
from kvkeep.engine.pooled_batch import InflightStep, PooledBatch
from kvkeep.engine.prefix_store import PrefixStore, nbytes_of
from kvkeep.engine.request import Pin, Request
from kvkeep.errors import BadInput
from kvkeep.model.head_shards import agree_on_least


class HeldRequests:
    """Where there is a cap, a prompt reserves what its prefill takes at most, and waits until that is free."""

    def __init__(self, model: Any, memory: int | None, store: PrefixStore | None) -> None:
        """memory: bytes of keys and values of all requests and stored prefixes"""
        self.model, self.store = model, store
        self.memory = MemoryCap(memory, self._most_held, self._free_some) if memory else None
        self.check_alike: Callable[[Exception], None] = lambda error: None  # raises what one process alone must not do
        self.submitted: deque[Request] = deque()  # by any thread, since the last step
        self.waiting = FairQueue()  # those whose prompts are not prefilled to the end
        self.sampled: deque[InflightStep] = deque()  # first tokens on their way, of prompts prefilled not long ago
        self.prefilled: deque[tuple[Request, DecodeBatch]] = deque()  # those a batch has no room for yet
        self.finished: deque[tuple[Request, DecodeBatch]] = deque()  # they still have a row
        self.batches: dict[str, DecodeBatch] = {}

    @property
    def running(self) -> list[Request]:
        return [request for batch in self.batches.values() for request in batch.requests]

    @property
    def num_rows(self) -> int:
        """Of requests that are prefilled."""
        return len(self.running) + len(self.sampled) + len(self.prefilled)

    @property
    def busy(self) -> bool:
        return bool(self.num_requests)  # of which some may be finished

    @property
    def num_requests(self) -> int:
        """From any thread."""
        queued = len(self.submitted) + len(self.waiting) + len(self.sampled) + len(self.prefilled)
        return queued + sum(len(batch.requests) for batch in list(self.batches.values()))

    @property
    def num_waiting(self) -> int:
        """Those whose prompts are not prefilled to the end. From any thread."""
        return len(self.submitted) + len(self.waiting)

    @property
    def requests(self) -> list[Request]:
        """All that are not done."""
        return [*self.submitted, *self.taken]

    @property
    def taken(self) -> list[Request]:
        """The same, but for those submitted since the last step."""
        sampled = [request for first in self.sampled for request in first.requests.values()]
        return [*self.waiting, *sampled, *(each for each, _ in self.prefilled), *self.running]

    # memory

    def reserve(self, request: Request) -> bool:
        """Memory for its prefill; raises BadInput if that does not fit alone. -> False: others hold it"""
        if self.memory is None:
            return True
        needed = row_bytes(self.model, request.prefill_tokens + request.draft_tokens)
        self.memory.largest_prompt = max(self.memory.largest_prompt, min(needed, self.memory.total))
        if not self.memory.make_room(needed):
            if self.num_rows or any(each.started for each in self.waiting):
                return False
            raise BadInput(
                f"keys and values of this prompt take {format_bytes(needed)} in prefill, and "
                f"{format_bytes(self.memory.left)} of memory= are left; use a shorter prompt, prefill_chunk_size=, or "
                "more memory."
            )
        request.reserved = needed
        return True

    @property
    def held_bytes(self) -> int:
        """Keys and values of pools and drafts, of caches of their own, and of stored prefixes."""
        pools = [batch.pool.nbytes for batch in self.batches.values() if isinstance(batch, PooledBatch)]
        pools.append(draft_pool.held_bytes(self.model))
        stored = 0 if self.store is None else self.store.nbytes
        return stored + sum(pools) + sum(request.own_bytes for request in self.requests)

    def draft_room(self) -> int:
        """Bytes that drafts may take: what they have, and what is left. For one row, each prompt reserves them."""
        return self.memory.left + draft_pool.held_bytes(self.model) if self.memory else sys.maxsize

    def _most_held(self) -> int:
        """By any process, where several share the model."""
        return -agree_on_least(self.model, -self.held_bytes)

    def _free_some(self) -> bool:
        """The oldest stored prefix, a pool that nobody is in, or the drafts'. -> whether there was one"""
        if self.store is not None and self.store.evict_oldest():
            return True
        soon = [batch for _, batch in self.prefilled]
        idle = [kind for kind, batch in self.batches.items() if not batch.requests and batch not in soon]
        pools = [kind for kind in idle if isinstance(self.batches[kind], PooledBatch)]
        for kind in pools[:1]:
            del self.batches[kind]
        return bool(pools) or draft_pool.free_pool(self.model)

    def store_prefix(self, request: Request) -> None:
        """What its sequence is after a part of the prompt, if there is memory for a copy."""
        if self.store is None or (self.memory and not self._room_for_copy(nbytes_of(request.sequence))):
            return
        try:
            self.store.add(request.key, request.sequence.fork())
        except torch.OutOfMemoryError as error:
            self.check_alike(error)
            self.store.evict_oldest()

    def store_pinned(self, request: Request, pin: Pin) -> str:
        """A text that is prefilled, until it is removed. -> its id"""
        assert self.store is not None
        sequence = request.sequence
        sequence.cache.tracker.mark_context()
        return self.store.add(request.key, sequence, True, public=pin.public, text=pin.text)

    def _room_for_copy(self, size: int) -> bool:
        """Older copies make room, and nobody else."""
        assert self.memory is not None and self.store is not None
        while self.memory.left < size and self.store.evict_oldest():
            pass
        return self.memory.left >= size

    def has_room(self, request: Request, batch: DecodeBatch, between_steps: bool) -> bool:
        """-> False: others have to end first; raises BadInput if that would not help

        between_steps: others may be restarted for it
        """
        if self.memory is None:
            return batch.has_room(request, self.waiting)
        while True:
            with suppress(BadInput):
                if batch.has_room(request, self.waiting):
                    return True
            if self.running or self.sampled or not between_steps:
                return False
            if not (self.memory.free_some() or self._restart_another(request)):
                raise BadInput(
                    f"keys and values of this sequence take {format_bytes(request.own_bytes)}, a row for it and "
                    f"{request.how.max_new_tokens} new tokens come to that, and memory= is "
                    f"{format_bytes(self.memory.total)}; use a smaller budget, fewer new tokens, or more memory."
                )

    def _restart_another(self, request: Request) -> bool:
        """One that waits behind it, and holds what it needs. -> whether there was one"""
        begun = [each for each in self.waiting if each.started]
        others = [*begun, *(each for each, _ in self.prefilled if each is not request)]
        for other in [each for each in others if not each.continues][-1:]:
            if other not in begun:
                self.prefilled = deque(each for each in self.prefilled if each[0] is not other)
                self.waiting.put_back([other])
            other.restart()
            return True
        return False
