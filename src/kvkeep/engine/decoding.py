"""The decode steps of a scheduler: rows for prefilled requests, one token for each of them, and its delivery."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvkeep.cache.cache import Cache
from kvkeep.cache.decode.buffered_pool import BufferedPool
from kvkeep.cache.decode.policy import Policy
from kvkeep.cache.decode.runner import DecodePool
from kvkeep.cache.decode.step_pool import StepPool
from kvkeep.cache.decode.vote_pool import VotePool
from kvkeep.engine.batch import DecodeBatch
from kvkeep.engine.held_memory import HeldMemory
from kvkeep.engine.held_requests import OUT_OF_MEMORY, HeldRequests, own_error
from kvkeep.engine.pace import Pace
from kvkeep.engine.pooled_batch import PooledBatch
from kvkeep.engine.request import Request, State
from kvkeep.engine.retrieval_batch import RetrievalBatch
from kvkeep.model.hf_cache import execution_device

POOLS: Mapping[Policy, Callable[[Cache], DecodePool]] = {
    Policy.EVICT_ONE: StepPool,
    Policy.VOTE: VotePool,
    Policy.EVICT: BufferedPool,
}


class Decoding:
    """Decodes in batches, and makes a batch of a kind when the first request needs it."""

    def __init__(
        self, model: Any, held: HeldRequests, memory: HeldMemory, max_tokens: int | None, pace: Pace
    ) -> None:
        """max_tokens: as in `PooledBatch`"""
        self.model, self.held, self.memory, self.pace = model, held, memory, pace
        self.device = execution_device(model).type
        self.pool_sizes = held.max_rows, max_tokens, memory.cap

    @property
    def in_use(self) -> list[DecodeBatch]:
        """The batches that have requests."""
        return [batch for batch in self.held.batches.values() if batch.requests]

    def place(self, request: Request) -> None:
        """Choose the batch of a request whose first token is delivered: it waits for a row from now on."""
        batch = self.batch_for(request)
        self.held.first_tokens.pop(request, None)
        self.held.batch_of[request] = batch
        request.move(State.PREFILLED)

    def admit(self, between_steps: bool = False) -> None:
        """Give rows to prefilled requests in their order, until one does not fit."""
        while prefilled := self.held.prefilled:
            request = prefilled[0]
            batch = self.held.batch_of[request]
            try:
                if not self.memory.has_room(request, batch, between_steps):
                    return
                batch.admit(request)
                request.move(State.DECODING)
            except OUT_OF_MEMORY as error:
                self._restart(batch, [*batch.requests, request], error)
            except Exception as error:
                self.held.end(request, error)

    def launch(self, batch: DecodeBatch) -> None:
        try:
            self.pace.begin_step()
            batch.launch()
        except OUT_OF_MEMORY as error:
            self._restart(batch, list(batch.requests), error)

    def _restart(self, batch: DecodeBatch, requests: list[Request], error: Exception) -> None:
        """Restart these, fewer at a time, in another pool: this one may have grown in some layers alone."""
        held = self.held
        held.check_alike(error)
        self.release_finished()
        requests = [each for each in requests if not each.done]
        batch.clear()
        held.batches = {kind: each for kind, each in held.batches.items() if each is not batch}
        held.row_limit = max(1, len(requests) // 2)
        guesses = list(held.guesses.values())  # they fail, and those they are for begin again
        lost = [each for each in requests if len(requests) == 1 or each.continues or each in guesses]
        for request in lost:
            del held.batch_of[request]
            request.finish(own_error(error))
        held.restart([each for each in requests if each not in lost])
        for request in [each for each in held.prefilled if held.batch_of[each] is batch]:
            held.batch_of[request] = self.batch_for(request)

    def replay(self, batches: list[DecodeBatch]) -> bool:
        """Make a decode step in the middle of a prefill pass. -> whether there was one to make"""
        with torch.inference_mode(False):
            self.release_finished()
            ready = [batch for batch in batches if batch.replays]
            for batch in ready:
                self.launch(batch)
                self.collect(batch)
        return bool(ready)

    def replay_due(self, batches: list[DecodeBatch]) -> None:
        """Make a decode step in the middle of a prefill, if the last one was long enough ago."""
        if self.pace.is_due:
            self.replay(batches)

    def collect(self, batch: DecodeBatch) -> None:
        """Deliver the tokens of a step."""
        for request, token, logprobs in batch.collect():
            if request.done:  # one step too many
                continue
            request.steps += 1
            request.add(token, logprobs)
            if request.done and not request.keeps_cache:
                self.release_finished()

    def release_finished(self) -> None:
        """Release the rows of requests that are done. A cache that is kept is completed here, between two steps."""
        for request in [each for each in self.held.batch_of if each.done]:
            self.held.remove(request)
            if not self.held.num_rows:  # whoever ran out of memory has been answered with fewer rows
                self.held.row_limit = self.held.max_rows

    def batch_for(self, request: Request) -> DecodeBatch:
        cache = request.sequence.cache
        policy = Policy.of(cache)
        if policy is Policy.APPEND and not cache.make_room(request.how.max_new_tokens):
            policy = Policy.ALONE
        batch = self._batch(policy, cache)
        if isinstance(batch, RetrievalBatch) and not batch.can_hold(request):
            return self._batch(Policy.ALONE, cache)
        return batch

    def _batch(self, policy: Policy, cache: Cache) -> DecodeBatch:
        """Some pools are of one method and budget; without graphs, several share forward passes instead."""
        batches, kind = self.held.batches, policy.value
        if policy is Policy.APPEND:
            kind += f": {cache.storage}"
        elif policy is not Policy.ALONE:
            kind += f": {cache.method} {cache.budget}"
        if kind not in batches:
            alike = [name for name in batches if name.startswith(f"{policy.value}:") and policy is not Policy.APPEND]
            idle = [name for name in alike if name in self.held.idle]
            if alike != idle and self.device != "cuda":
                return self._batch(Policy.ALONE, cache)
            for name in idle:
                del batches[name]  # its memory is needed
            batches[kind] = self._new_batch(policy, cache)
        return batches[kind]

    def _new_batch(self, policy: Policy, cache: Cache) -> DecodeBatch:
        if policy is Policy.ALONE:
            return DecodeBatch(self.model, self.held.max_rows, self.memory.cap)
        if policy is Policy.APPEND:
            return PooledBatch(self.model, cache.storage, *self.pool_sizes)
        if policy is Policy.RETRIEVE:
            return RetrievalBatch(cache, *self.pool_sizes)
        pool = POOLS[policy](cache)
        return PooledBatch(self.model, cache.storage, *self.pool_sizes, pool)
