"""Continuous batching: each step decodes one token for every running request, beside a chunk of the waiting prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.cache.draft_pool import MOST_ROWS, most_held
from kvkeep.cache.passes import between_passes, run_passes
from kvkeep.cache.step_pool import StepPool, step_rule
from kvkeep.engine.decode_batch import DecodeBatch
from kvkeep.engine.held_requests import HeldRequests
from kvkeep.engine.independent_batch import IndependentBatch, fits_host
from kvkeep.engine.packed_forward import AfterLayer, PackedForward
from kvkeep.engine.pooled_batch import InflightStep, PooledBatch, can_pool
from kvkeep.engine.prefix_store import PrefixStore
from kvkeep.engine.request import Request
from kvkeep.engine.retrieval_batch import RetrievalBatch
from kvkeep.engine.retrieval_pool import retrieval_plan
from kvkeep.engine.sampling import SamplingRows, TokenLogprobs
from kvkeep.engine.sequence import Sequence
from kvkeep.errors import StoreFull
from kvkeep.model.hf_cache import attention_cost, execution_device
from kvkeep.storage.upload import upload

Chunk = tuple[Request, Tensor]  # a request, and those of its ids that are prefilled next
News = tuple[list[Request], list[Request]]  # requests submitted since the last step; those that are cancelled
OUT_OF_MEMORY = torch.OutOfMemoryError, StoreFull
PACKED_TOKENS = {"cuda": 8192, "cpu": 1024}  # of several prompts in one forward pass
BESIDE_TOKENS = {"cuda": 8192, "cpu": 256}  # of prompts beside interactive answers; fewer, the more they attend to
STEP_TOKENS = 2048  # of these, between two decode steps that are replayed
EVICTION_TOKENS = 6144  # that could be prefilled while a prompt is evicted from
MIN_CHUNK = 16  # tokens
INDEPENDENT, POOLED, STEPS, RETRIEVAL = "independent", "pooled", "steps", "retrieval"  # families of batches


class Abandoned(Exception):
    """All requests of a forward pass were cancelled while the model ran again over their prompts."""


class Scheduler(HeldRequests):
    """Requests over the rows of a pooled and an independent batch."""

    def __init__(
        self,
        model: Any,
        eos_token_ids: set[int],
        max_rows: int = 64,
        max_tokens: int | None = None,
        memory: int | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        """max_tokens: as in `PooledBatch`; memory: bytes of keys and values of all requests, None: what is free"""
        self.eos_token_ids, self.max_rows = eos_token_ids, max_rows
        super().__init__(model, memory, store)
        self.pool_sizes = max_rows, max_tokens, self.memory
        self.forward = PackedForward(model)
        self.attention_cost, self.device = attention_cost(model), execution_device(model).type
        self.row_limit = max_rows  # fewer while memory is short
        self.agree: Callable[[News], News] = lambda news: news  # what all processes that share the model know

    def submit(self, request: Request) -> Request:
        """From any thread."""
        self.submitted.append(request)
        return request

    def run(self, requests: Iterable[Request]) -> None:
        """Until all of these are done."""
        submitted = [self.submit(request) for request in requests]
        while not all(request.done for request in submitted):
            self.step()
        self.release_finished()

    def step(self) -> None:
        """Launch a decode step of all running requests, prefill a chunk beside it, deliver the decoded tokens."""
        self.release_finished()
        self.drop_cancelled()
        self._admit_prefilled(between_steps=True)
        chunks, num_sampled = list(self._next_chunks()), len(self.sampled)
        active = self._to_decode(chunks)
        for batch in active:
            self._launch(batch)
            if self.device != "cuda":  # its tokens are there
                self._collect(batch)
        self._prefill(chunks, active)
        self._end_prefills(num_sampled, chunks, active)  # the device has the next pass to do meanwhile
        for batch in active:
            self._collect(batch)

    def _to_decode(self, chunks: list[Chunk]) -> list[DecodeBatch]:
        """While nobody reads the answers, all prompts are prefilled first: a step of many rows takes little longer."""
        if chunks and not self._is_read:
            return []
        return [batch for batch in self.batches.values() if batch.requests]

    @property
    def _is_read(self) -> bool:
        """Whether somebody waits for the next token of an answer."""
        return any(request.interactive for request in (*self.running, *self._first_sampled))

    @property
    def _first_sampled(self) -> list[Request]:
        """Requests whose first token is sampled, and whose prefill is not at its end."""
        return [first.requests[0] for first in self.sampled]

    def drop_cancelled(self) -> None:
        """Between two steps, when those that were submitted join the others."""
        new = [self.submitted[number] for number in range(len(self.submitted))]
        gone = [each for each in (*new, *self.taken) if each.cancelled]
        submitted, gone = self.agree((new, gone))
        for request in submitted:
            self.waiting.append(request)
        for _ in new:  # last: `abort` finds them, whatever is raised before
            self.submitted.popleft()
        for request in [each for each in self.waiting if each in gone]:
            self._finish(request)
        for first in [each for each in self.sampled if each.requests[0] in gone]:
            self.sampled.remove(first)
            first.requests[0].finish()
        for request, batch in [each for each in self.prefilled if each[0] in gone]:
            self.prefilled.remove((request, batch))
            request.finish()
        for batch in self.batches.values():
            for request in [each for each in batch.requests if each in gone]:
                batch.release(request)
                request.finish()

    def _finish(self, request: Request, error: BaseException | None = None) -> None:
        """End a waiting request."""
        self.waiting.remove(request)
        request.finish(error)

    def abort(self, error: BaseException) -> None:
        """All requests fail: a step was cut short, and may have left anything."""
        for request in self.taken:
            request.finish(own_error(error))
        while self.submitted:  # other threads may add to it meanwhile
            self.submitted.popleft().finish(own_error(error))
        for queue in (self.waiting, self.sampled, self.prefilled, self.finished):
            queue.clear()
        for batch in self.batches.values():
            batch.clear()

    # decode

    def _launch(self, batch: DecodeBatch) -> None:
        try:
            batch.launch()
        except OUT_OF_MEMORY as error:
            self.check_alike(error)
            self._restart(batch, list(batch.requests), error)

    def _restart(self, batch: DecodeBatch, requests: list[Request], error: BaseException) -> None:
        """These, fewer at a time, in another pool: this one may have grown in some layers alone."""
        requests = [each for each in requests if not each.done]
        batch.clear()
        self.batches = {kind: each for kind, each in self.batches.items() if each is not batch}
        self.row_limit = max(1, len(requests) // 2)
        lost = [each for each in requests if len(requests) == 1 or each.continues]
        for request in lost:
            request.finish(own_error(error))
        restarted = [each for each in requests if each not in lost]
        for request in restarted:
            request.restart()
        self.waiting.put_back(restarted)
        self.prefilled = deque((each, self._batch_for(each) if its is batch else its) for each, its in self.prefilled)

    def _replay(self, batches: list[DecodeBatch]) -> None:
        """A decode step in the middle of a prefill pass."""
        with torch.inference_mode(False):
            self.release_finished()
            for batch in batches:
                if batch.replays:
                    self._launch(batch)
                    self._collect(batch)

    def _collect(self, batch: DecodeBatch) -> None:
        for request, token, logprobs in batch.collect():
            self._deliver(batch, request, token, logprobs)

    def _deliver(self, batch: DecodeBatch, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        if request.done:  # one step too many
            return
        request.steps += 1
        request.add(token, logprobs)
        if request.done:
            self.finished.append((request, batch))
            if not request.keeps_cache:
                self.release_finished()

    def release_finished(self) -> None:
        """Between two steps. A cache that is kept is completed here, when its last token has been delivered."""
        while self.finished:
            request, batch = self.finished.popleft()
            batch.release(request)
            if not self.num_rows:  # whoever ran out of memory has been answered with fewer rows
                self.row_limit = self.max_rows

    # prefill

    def _next_chunks(self) -> Iterator[Chunk]:
        """The next chunk of the prompts whose turn it is, as many as fit into one forward pass."""
        others = len(self.waiting) > 1 and any(request.interactive for request in self.waiting)
        beside, first = self._is_read or others, True
        limit: float = (BESIDE_TOKENS if beside else PACKED_TOKENS)[self.device]
        for request in self._turns():
            if request.logits is not None and request.is_prefilled:
                with self._fails_alone(request):
                    self._begin_answer(request, request.logits)
                continue
            cost = self._cost(request)
            in_parts = beside or request.is_split or (request.is_submitted and self.device == "cpu")
            whole = request.next_chunk(None)
            ids = request.next_chunk(chunk_size(limit / cost)) if in_parts else whole
            if not first and not (request.packs and len(ids) == len(whole) and len(ids) * cost <= limit):
                return
            self.waiting.take_turn(request)
            yield request, ids
            limit, first = limit - len(ids) * cost, False
            if limit < 1 or not (request.packs and self.forward.shares_forward):
                return

    def _turns(self) -> Iterator[Request]:
        """Prompts that can be prefilled now. Behind one that does not fit, none begins."""
        rows = 0 if self.prefilled else self.row_limit - self.num_rows
        waiting = list(self.waiting) if rows > 0 else []
        begun, fits = sum(each.started for each in waiting), True
        for request in waiting:
            if not request.started:
                fits = fits and begun < rows and self._start(request, alone=not (begun or self.num_rows))
                begun += fits
            if request.started:
                yield request

    def _cost(self, request: Request) -> float:
        """Of its next token, where one that attends to nothing costs 1."""
        return 1 + self.attention_cost * request.sequence.cache.seen

    def _start(self, request: Request, alone: bool) -> bool:
        """Make its sequence, if that is not done. -> False: it failed, or has to wait until others are done"""
        if request.started:
            return True
        try:
            if not (alone or fits_host(request)) or not self.reserve(request):
                return False
            request.start()
        except Exception as error:
            self.check_alike(error)
            self._fail(request, error)
        return request.started

    def _prefill(self, chunks: list[Chunk], active: list[DecodeBatch]) -> None:
        """One forward pass; a long one lets captured decode steps of the active batches pass between its layers."""
        if not chunks:
            return
        for request, ids in chunks:
            cache, ends = request.sequence.cache, request.ends_with(ids)
            cache.settles_later = ends and request.can_settle_later
            cache.passes_later = ends and request.can_draft_later
        try:
            passing, caches = self._decode_between_layers(chunks, active), [one.sequence.cache for one, _ in chunks]
            meanwhile = partial(self._between_passes, [request for request, _ in chunks], active)
            with between_passes(caches, meanwhile, self.draft_room):
                logits = self.forward([(request.sequence, ids) for request, ids in chunks], 1, passing)
        except Exception as error:
            self.check_alike(error)
            if len(chunks) == 1 and not isinstance(error, Abandoned):
                return self._fail(chunks[0][0], error)
            for request, _ in chunks:  # alone, it will be seen whose error it is
                request.packs = False
                request.restart()
        else:
            for (request, _), after in zip(chunks, logits, strict=True):
                with self._fails_alone(request):
                    self._advance(request, after[-1])

    def _between_passes(self, requests: list[Request], active: list[DecodeBatch]) -> None:
        """Let others decode. Raise `Abandoned` where nobody waits for any of the requests: the next step drops them."""
        self._replay(active)
        if all(request.cancelled for request in requests):
            raise Abandoned

    def _decode_between_layers(self, chunks: list[Chunk], active: list[DecodeBatch]) -> AfterLayer | None:
        """What a pass calls after every layer, if it is a long one."""
        batches = [batch for batch in active if batch.replays]
        if not batches:
            return None
        cost = sum(len(ids) * self._cost(request) for request, ids in chunks)
        cost += EVICTION_TOKENS * sum(request.ends_with(ids) for request, ids in chunks)
        layers = len(self.forward.compressed_layers)
        every = max(1, int(layers * STEP_TOKENS / cost))
        return lambda index: self._replay(batches) if index % every == every - 1 and index < layers - 1 else None

    @contextmanager
    def _fails_alone(self, request: Request) -> Iterator[None]:
        """What is raised within ends this request, wherever it stands, and no other."""
        try:
            yield
        except Exception as error:
            self.check_alike(error)
            if request in list(self.waiting):
                self.waiting.remove(request)
            self.prefilled = deque(each for each in self.prefilled if each[0] is not request)
            request.finish(error)

    def _fail(self, request: Request, error: Exception) -> None:
        """Out of memory beside others: try again when some of them are done."""
        others = any(each.started for each in self.waiting if each is not request)
        if isinstance(error, OUT_OF_MEMORY) and (self.num_rows or others):
            self.row_limit = self.num_rows or 1
            request.restart()
        else:
            self._finish(request, error)

    def _advance(self, request: Request, logits: Tensor) -> None:
        """After a chunk: report progress; after the last, begin the answer."""
        request.report_progress()
        if request.ends_part:
            request.sequence.cache.tracker.mark_prompt()
        if request.ends_part and not request.is_prefilled:
            self.store_prefix(request)
            request.begin_part()
        if request.is_prefilled:
            if not request.sequence.cache.passes_later:
                request.reserved = 0
            if request.pin is not None:
                request.pinned = self.store_pinned(request, request.pin)
            if request.prefill_only:
                self._finish(request)
            else:
                self._begin_answer(request, logits)

    def _begin_answer(self, request: Request, logits: Tensor) -> None:
        self.waiting.remove(request)
        request.eos_token_ids = self.eos_token_ids
        rows, row = SamplingRows.of([request.how], logits.device, [request.edit]), logits[None]
        token = self._sample_first(request, rows, row)
        first = InflightStep.of({0: request}, token, rows.logprobs(row, token))
        if request.sequence.cache.settles_later or request.sequence.cache.passes_later:
            self.sampled.append(first)
        else:
            self._end_prefill(first)

    @property
    def _drafts_due(self) -> list[Request]:
        """The requests whose prompts are prefilled and whose drafts are not decoded yet."""
        return [request for request in self._first_sampled if request.sequence.cache.passes_later]

    def _end_prefills(self, count: int, chunks: list[Chunk], active: list[DecodeBatch]) -> None:
        """End the first `count` prefills that have a sampled token: those from before the pass over these chunks."""
        sampled, due = list(self.sampled)[:count], self._drafts_due
        is_read = any(first.requests[0].interactive for first in sampled)
        begins = bool(due) and (is_read or not self._may_wait(due, chunks))
        for first in self.sampled if begins else sampled:
            self._deliver_first(first)
        if begins:
            self._run_passes(due, active)
        for first in sampled:
            if first in self.sampled and not first.requests[0].sequence.cache.passes_later:
                self._end_prefill(first)
                self.sampled.remove(first)

    def _deliver_first(self, first: InflightStep) -> None:
        """Before its draft, if that is due: the token does not depend on what is evicted, but an end has to wait."""
        if not first.requests[0].sequence.cache.passes_later:
            return
        for request, token, logprobs in first.wait():
            if not request.answer.ids and request.goes_on_after(token):
                request.add(token, logprobs)

    def _may_wait(self, due: list[Request], chunks: list[Chunk]) -> bool:
        """For the drafts of prompts that are prefilled now. Where somebody reads, they wait for one pass at most."""
        more = any(request.can_draft_later for request, _ in chunks)
        held = sum(request.sequence.cache.nbytes for request in due)
        return more and len(due) < MOST_ROWS and held < most_held(self.model)

    def _run_passes(self, requests: list[Request], active: list[DecodeBatch]) -> None:
        """After prompts whose drafts have waited: together or, where that fails, one by one."""
        caches = [request.sequence.cache for request in requests]
        for cache in caches:
            cache.passes_later = False
        with between_passes(caches, partial(self._replay, active), self.draft_room):
            try:
                run_passes(caches)
            except Exception as error:
                self.check_alike(error)
            for request, cache in zip(requests, caches, strict=True):
                try:
                    run_passes([cache])  # nothing, if it was one of those that did not fail
                    request.reserved = 0
                except Exception as error:
                    self.check_alike(error)
                    self._fail_sampled(request, error)

    def _fail_sampled(self, request: Request, error: Exception) -> None:
        """Out of memory beside others: try again when some of them are done."""
        self.sampled = deque(first for first in self.sampled if first.requests[0] is not request)
        if isinstance(error, OUT_OF_MEMORY) and self.num_rows:
            self.row_limit = self.num_rows
            request.restart()
            self.waiting.put_back([request])
        else:
            request.finish(error)

    def _end_prefill(self, first: InflightStep) -> None:
        """When the first token of a prefilled request is there."""
        for request, token, logprobs in first.wait():
            with self._fails_alone(request):
                request.sequence.cache.settle()
                request.count_kept()
                if not request.answer.ids:
                    request.add(token, logprobs)
                if not request.done:
                    self.prefilled.append((request, self._batch_for(request)))
        self._admit_prefilled()

    def _sample_first(self, request: Request, rows: SamplingRows, logits: Tensor) -> Tensor:
        """logits [1, vocabulary] -> [1]"""
        if request.banned_first:
            banned = upload(list(request.banned_first), logits.device)
            logits = logits.index_fill(-1, banned, float("-inf"))
        position = upload([len(request.ids)], logits.device)
        return rows.sample(logits, position, {0: request.allowed()} if request.how.constraint else None)

    def _batch_for(self, request: Request) -> DecodeBatch:
        cache = request.sequence.cache
        batch = self._batch(self._batch_kind(request.sequence), cache)
        moves_keys = can_pool(request.sequence) and not cache.make_room(request.how.max_new_tokens)
        if moves_keys or isinstance(batch, RetrievalBatch) and not batch.can_hold(request):
            return self._batch(INDEPENDENT, cache)
        return batch

    def _batch(self, kind: str, cache: Cache) -> DecodeBatch:
        if kind not in self.batches:
            self.batches[kind] = self._new_batch(kind, cache)
        return self.batches[kind]

    def _batch_kind(self, sequence: Sequence) -> str:
        """Some pools are of one method and budget; without graphs, several share forward passes instead."""
        cache = sequence.cache
        if can_pool(sequence):
            return f"{POOLED} {cache.storage}"
        family = STEPS if step_rule(cache) else RETRIEVAL if retrieval_plan(cache) else INDEPENDENT
        kind = f"{family} {cache.method} {cache.budget}"
        shares = self.device != "cuda" and not self._busy(family) <= {kind}
        return INDEPENDENT if family == INDEPENDENT or shares else kind

    def _new_batch(self, kind: str, cache: Cache) -> DecodeBatch:
        family = kind.split()[0]
        if family == INDEPENDENT:
            return IndependentBatch(self.model, self.max_rows, self.memory)
        if family == POOLED:
            return PooledBatch(self.model, cache.storage, *self.pool_sizes)
        for idle in [name for name in self.batches if name.startswith(family) and name not in self._busy(family)]:
            del self.batches[idle]  # its memory is needed
        if family == RETRIEVAL:
            return RetrievalBatch(cache, *self.pool_sizes)
        return PooledBatch(self.model, cache.storage, *self.pool_sizes, StepPool(cache))

    def _busy(self, family: str) -> set[str]:
        """Pools of this family that have requests, or will have."""
        soon = [batch for _, batch in self.prefilled]
        busy = [kind for kind, batch in self.batches.items() if batch.requests or batch in soon]
        return {kind for kind in busy if kind.startswith(family)}

    def _admit_prefilled(self, between_steps: bool = False) -> None:
        while self.prefilled:
            request, batch = self.prefilled[0]
            try:
                if not self.has_room(request, batch, between_steps):
                    return
                batch.admit(request)
                self.prefilled.popleft()
            except OUT_OF_MEMORY as error:
                self.check_alike(error)
                self.prefilled.popleft()
                self._restart(batch, [*batch.requests, request], error)
            except Exception as error:
                self.check_alike(error)
                self.prefilled.popleft()
                request.finish(error)


def own_error(error: BaseException) -> BaseException:
    """One for each of several requests: threads that raise it add their own ways to it."""
    try:
        made = type(error)(*error.args)
    except Exception:  # it is made of other things than it shows
        made = RuntimeError(str(error))
    made.__cause__ = error
    return made


def chunk_size(most: float) -> int:
    """At most so many tokens: a power of two, or one and a half. Kernels plan for every new size."""
    power = 1 << int(max(MIN_CHUNK, most)).bit_length() - 1
    return power * 3 // 2 if most >= power * 3 / 2 else power
