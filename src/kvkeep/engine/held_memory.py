"""The memory that a scheduler's requests, pools and stored prefixes hold, and who may have more of it."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch

from kvkeep.cache.decode import draft_pool
from kvkeep.cache.report import format_bytes
from kvkeep.engine.batch import DecodeBatch
from kvkeep.engine.held_requests import HeldRequests
from kvkeep.engine.memory import MemoryCap, row_bytes
from kvkeep.engine.pooled_batch import PooledBatch
from kvkeep.engine.request import Request
from kvkeep.engine.store import Store
from kvkeep.engine.stored import nbytes_of
from kvkeep.errors import BadInput
from kvkeep.model.head_shards import agree_on_least


class HeldMemory:
    """Where there is a cap, a prompt reserves what its prefill takes at most, and waits until that is free."""

    def __init__(self, model: Any, held: HeldRequests, memory: int | None, store: Store) -> None:
        """memory: bytes of keys and values of all requests and stored prefixes"""
        self.model, self.held, self.store = model, held, store
        self.cap = MemoryCap(memory, self._most_held, self._free_some) if memory else None

    def reserve(self, request: Request, alone: bool) -> bool:
        """Reserve memory for its prefill; raise BadInput if that does not fit alone. -> False: others hold it"""
        if self.cap is None:
            return True
        needed = row_bytes(self.model, request.prefill_tokens + request.draft_tokens)
        if needed <= request.reserved:
            return True
        self.cap.largest_prompt = max(self.cap.largest_prompt, min(needed, self.cap.total))
        if not self.cap.make_room(needed - request.reserved):
            if not alone:
                return False
            raise BadInput(
                f"keys and values of this prompt take {format_bytes(needed)} in prefill, and "
                f"{format_bytes(self.cap.left)} of memory= are left; use a shorter prompt, prefill_chunk_size=, or "
                "more memory."
            )
        request.reserved = needed
        return True

    @property
    def held_bytes(self) -> int:
        """Keys and values of pools and drafts, of caches of their own, and of stored prefixes."""
        pools = [batch.pool.nbytes for batch in self.held.batches.values() if isinstance(batch, PooledBatch)]
        pools.append(draft_pool.held_bytes(self.model))
        return self.store.nbytes + sum(pools) + sum(request.own_bytes for request in self.held.requests)

    def draft_room(self) -> int:
        """Bytes that drafts may take: what they have, and what is left. For one row, each prompt reserves them."""
        return self.cap.left + draft_pool.held_bytes(self.model) if self.cap else sys.maxsize

    def _most_held(self) -> int:
        """The most bytes that any process holds, where several share the model."""
        return -agree_on_least(self.model, -self.held_bytes)

    def _free_some(self) -> bool:
        """Free the oldest stored prefix, a pool that nobody is in, or the drafts'. -> whether there was one"""
        if self.store.evict_oldest():
            return True
        pools = [kind for kind in self.held.idle if isinstance(self.held.batches[kind], PooledBatch)]
        for kind in pools[:1]:
            del self.held.batches[kind]
        return bool(pools) or draft_pool.free_pool(self.model)

    def store_prefix(self, request: Request) -> None:
        """Store what its sequence is after a part of the prompt, if there is memory for a copy."""
        if not self.store.max_bytes:
            return
        if self.cap:  # only older copies make room for this one
            size = nbytes_of(request.sequence)
            while self.cap.left < size:
                if not self.store.evict_oldest():
                    return
        try:
            self.store.add(request.owner, request.sequence.fork())
        except torch.OutOfMemoryError as error:
            self.held.check_alike(error)
            self.store.evict_oldest()

    def store_history(self, request: Request) -> None:
        """Store the history of a prompt that is prefilled."""
        known = request.sequence.history
        if self.store.histories and known and request.shares_history and request.pin is None:
            self.store.histories.add(request.owner, request.ids, known)
        if known and request.how.exact:
            known.makes_blocks = False  # of an answer: the next turn prefills it

    def has_room(self, request: Request, batch: DecodeBatch, between_steps: bool) -> bool:
        """Whether a batch has room for a prefilled request. -> False: others have to end first

        between_steps: others may be restarted for it. Raises BadInput where nothing would help.
        """
        if self.cap is None:
            return batch.has_room(request, self.held.waiting)
        while True:
            with suppress(BadInput):
                if batch.has_room(request, self.held.waiting):
                    return True
            if self.held.answering or not between_steps:
                return False
            if not (self.cap.free_some() or self._restart_another(request)):
                raise BadInput(
                    f"keys and values of this sequence take {format_bytes(request.own_bytes)}, a row for it and "
                    f"{request.how.max_new_tokens} new tokens come to that, and memory= is "
                    f"{format_bytes(self.cap.total)}; use a smaller budget, fewer new tokens, or more memory."
                )

    def _restart_another(self, request: Request) -> bool:
        """Restart one that waits behind it, and holds what it needs. -> whether there was one"""
        others = [each for each in (*self.held.begun, *self.held.prefilled) if each is not request]
        last = [each for each in others if not each.continues][-1:]
        self.held.restart(last)
        return bool(last)
