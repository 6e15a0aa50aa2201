"""Steps a scheduler for requests of any thread."""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NoReturn

import torch

from kvkeep.cache.cache import Cache
from kvkeep.cache.decode import draft_pool
from kvkeep.engine.lockstep import Leader
from kvkeep.engine.pooled_batch import USUAL_BUDGET
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.errors import CacheMisuse, QueueFull
from kvkeep.model.hf_cache import context_length, vocabulary_size

WARMUP_TOKENS = 64  # of a prompt, on a GPU beyond the budget
WARMUP_CHUNKS = 16384, 2048, 2048  # of a long prompt
POLL_S = 0.02  # seconds until a waiting thread looks whether another one still steps


class Driver:
    """Whoever waits for an answer steps the scheduler for everybody; `start` has a thread do it while there is work."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.lock = threading.RLock()  # held during a step
        self.stepped = threading.Condition()  # notified after a step
        self.stepper: int | None = None  # the thread that is in a step
        self.closed = False
        self.thread: threading.Thread | None = None
        self.thread_lock = threading.Lock()  # of `thread`
        self.ends_with_python = False  # whether its thread is stopped before Python ends
        self.submit_lock = threading.Lock()
        self.leader: Leader | None = None  # where other processes share the model, and make the same steps
        self.failed: Callable[[BaseException], None] = lambda error: None  # told of a step that was cut short

    def submit(self, request: Request, max_waiting: int | None = None) -> Request:
        """Take a request. max_waiting: refuse it where so many wait already"""
        if self.closed:
            raise CacheMisuse("this engine is closed; make a new one.")
        request.config.check_length(len(request.ids), request.how.max_new_tokens)
        with self.submit_lock:
            if max_waiting is not None and self.scheduler.held.num_waiting >= max_waiting:
                raise QueueFull(f"{max_waiting} requests wait already (max_waiting=); try again later.")
            if self.leader:
                self.leader.prepare(request)
            return self.scheduler.submit(request)

    def step(self) -> None:
        with self.lock:
            if self.stepper is not None:
                raise CacheMisuse("a progress callback cannot use the engine that calls it; use another engine.")
            self.stepper = threading.get_ident()
            try:
                self._or_abort(self.scheduler.step)
            finally:
                self.stepper = None
                with self.stepped:
                    self.stepped.notify_all()

    def _or_abort(self, change: Callable[[], None]) -> None:
        """Change what the scheduler holds; where that is cut short, every request fails."""
        try:
            change()
        except BaseException as error:
            self.scheduler.held.abort(error)
            self.failed(error)
            raise

    def wait(self, request: Request) -> None:
        """Step, or wait for who does, until a request has new text or is done."""
        while not (request.deltas or request.done):
            if self.scheduler.device == "cuda" and self.scheduler.held.num_requests > 1:
                self.start()  # decode steps pass in the middle of prefill: whoever is in that cannot read them
            elif self.lock.acquire(blocking=False):
                try:
                    self.step()
                finally:
                    self.lock.release()
                continue
            with self.stepped:
                self.stepped.wait(POLL_S)

    def run(self, requests: list[Request], rows: int) -> None:
        """Step until all of these are done, at most `rows` of them at a time."""
        waiting, active = deque(requests), list[Request]()
        try:
            while waiting or active:
                while waiting and len(active) < rows:
                    active.append(self.submit(waiting.popleft()))
                self.step()
                active = [request for request in active if not request.done]
        finally:
            self.cancel(active)

    def cancel(self, requests: list[Request]) -> None:
        """Free what they hold, after the step that another thread may be in; in a callback, after its own step."""
        pending = [request for request in requests if not request.done]
        for request in pending:
            request.cancelled = True
        if pending and self.leader and not self.closed:
            self.start()  # in the next step, as everywhere
        elif pending and self.stepper != threading.get_ident() and not sys.is_finalizing():
            with self.lock:
                self._or_abort(self.scheduler.drop_cancelled)

    def prefill(self, request: Request) -> None:
        """Prefill a text, beside all others."""
        try:
            self.wait(self.submit(request))
        finally:
            self.cancel([request])
        if request.error is not None:
            raise request.error
        if not (request.pinned if request.pin else request.is_prefilled):
            raise CacheMisuse("this engine was closed before the text was prefilled; make a new one.")

    def unpin(self, owner: str, id: str, once: bool = False) -> None:
        """Take back an owner's claim to a stored text; where other processes store it, too, in the next step.

        once: as in `Store.remove`
        """
        store, leader = self.scheduler.memory.store, self.leader
        if leader is None or self.closed:
            return store.remove(owner, id, once)
        store.text(owner, id, own=True)  # raises where it is not
        leader.unpinned.append((owner, id, once))
        self.start()
        while (owner, id, once) in leader.unpinned and not self.closed:
            with self.stepped:
                self.stepped.wait(POLL_S)

    def complete_cache(self, request: Request) -> None:
        """Complete the cache that a request keeps, when it is done."""
        if request.keeps_cache and request.done:
            with self.lock:
                self.scheduler.decoding.release_finished()

    def start(self) -> None:
        with self.thread_lock:
            if not self.ends_with_python:
                self.ends_with_python = True
                atexit.register(_stop, weakref.ref(self))  # a thread in the middle of a step would crash Python's end
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, name="kvkeep-engine", daemon=True)
                self.thread.start()

    def _run(self) -> None:
        while True:
            with suppress(BaseException):  # every request has been told
                while self._busy and not self.closed:
                    self.step()
            with self.thread_lock:
                if self.closed or not self._busy:
                    self.thread = None
                    return

    @property
    def _busy(self) -> bool:
        return bool(self.scheduler.held.num_requests) or bool(self.leader and self.leader.unpinned)

    def follow(self) -> NoReturn:
        """Step when the process that leads says so."""
        while True:
            self.step()

    def warmup(
        self, config: SequenceConfig, context: SequenceConfig, rows: int, progress: Callable[[str], None]
    ) -> None:
        """Answer one prompt, then allocate and capture for up to `rows` of them. context: of texts that are read"""
        with self.lock:
            on_gpu, budget = config.model.device.type == "cuda", config.budget
            progress("compiling" if on_gpu else "warming up")
            evicted = budget if isinstance(budget, int) and on_gpu else 0
            tokens = min(evicted + WARMUP_TOKENS, context_length(config.model) - 2)  # so that tokens are evicted
            ids = torch.arange(tokens) % vocabulary_size(config.model)
            self.run([Request(config, ids, Generation(2))], 1)
            if on_gpu:
                _prefill_in_chunks(config)
                sequence = context.new_sequence()
                sequence.prefill(ids[:-2])
                question = sequence.fork()
                question.cache.tracker.mark_context()
                question.forward(ids[:2])
            if draft := config.method.draft:
                kept = budget if isinstance(budget, int) else USUAL_BUDGET
                longest = draft.kept(kept, context_length(config.model))
                draft_pool.warmup(config.model, rows, longest, self.scheduler.memory.draft_room())
            for batch in self.scheduler.held.batches.values():
                batch.warmup(config, rows, progress)
            answer = 2 + (config.method.schedule.every or 0)  # until it evicts while it decodes
            if on_gpu and 2 < answer <= context_length(config.model) - tokens:
                self.run([Request(config, ids, Generation(answer))], 1)

    def close(self) -> None:
        """Cancel all requests, and free the pool."""
        self.closed = True
        with self.lock:
            if self.leader:
                self.leader.open = False
            self.cancel(self.scheduler.held.requests)
            self.scheduler.held.batches.clear()
            draft_pool.free_pool(self.scheduler.model)


def _prefill_in_chunks(config: SequenceConfig) -> None:
    """Prefill a long prompt in chunks, as beside running answers."""
    ids, sequence = torch.zeros(sum(WARMUP_CHUNKS), dtype=torch.int64), config.new_sequence()
    if len(ids) <= context_length(config.model) and sequence.defer_eviction(len(ids)):
        for size in WARMUP_CHUNKS:
            sequence.forward(sequence.next_chunk(ids, size))


def _stop(reference: weakref.ReferenceType[Driver]) -> None:
    driver = reference()
    thread = driver and driver.thread
    if driver and thread:
        driver.closed = True
        thread.join()


class Handle:
    """An answer under way: iterate over its text, also with `async for`; wait for it; or cancel it.

    An iteration that is left early cancels it, too.
    """

    def __init__(self, request: Request, driver: Driver) -> None:
        self.request, self._driver = request, driver

    @property
    def text(self) -> str:
        """The answer so far."""
        return self.request.text

    @property
    def done(self) -> bool:
        return self.request.done

    @property
    def cache(self) -> Cache:
        """The cache of an answer that is complete and keeps it, as those of `Context.submit` do."""
        if not self.request.keeps_cache:
            raise CacheMisuse(
                "this answer's cache was freed with it; use engine.stream, or engine.read(text).submit(…)."
            )
        self._driver.complete_cache(self.request)
        return self.request.sequence.cache

    def result(self) -> str:
        """The whole answer, when it is complete."""
        for _ in self:
            pass
        return self.text

    def cancel(self) -> None:
        """Stop, and free its memory; its text so far stays. Others are not affected."""
        self._driver.cancel([self.request])

    def __iter__(self) -> Iterator[str]:
        python_ends = sys.is_finalizing  # a module's own names are gone by then
        try:
            while not self._is_over():
                self._driver.wait(self.request)
                while self.request.deltas:
                    yield self.request.deltas.popleft()
        finally:
            if not python_ends():
                self.cancel()

    async def __aiter__(self) -> AsyncIterator[str]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        self.request.notify = partial(loop.call_soon_threadsafe, news.set)
        self._driver.start()
        try:
            while not self._is_over():
                news.clear()
                while self.request.deltas:
                    yield self.request.deltas.popleft()
                if not self.request.done:
                    await news.wait()
        finally:
            self.cancel()

    def _is_over(self) -> bool:
        """Whether all text was taken; raise what the request failed with."""
        over = self.request.done and not self.request.deltas
        if over and self.request.error is not None:
            raise self.request.error
        return over
