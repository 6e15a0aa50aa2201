"""One engine in several processes, each with some of the KV heads: all make the same steps, in the same order.

Requests come to the first process, the leader, at any time and from any thread. When a step begins, it tells the
others, its followers, what has happened since the last one, and each applies that at the same point of its own step.
All that comes after is decided alike: by the requests, by logits that are the same everywhere, and by memory that is
agreed on (`agree_on_least`). After what one process alone meets, such as too little memory, none goes on: `OutOfStep`.
"""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
import secrets
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import count
from typing import Any

from kvkeep.engine.request import Request
from kvkeep.engine.scheduler import News, Scheduler
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.engine.store import Store
from kvkeep.errors import CacheMisuse, KvkeepError

MOST_CONFIGS = 256  # that a follower remembers
Unpinned = tuple[str, str, bool]  # what `Store.remove` is given
OF_THE_LEADER = "progress", "continues", "logits"  # fields of a request that are not sent
ALONE = RuntimeError, MemoryError, OSError  # what one process may meet, and others not


class OutOfStep(BaseException):
    """The processes would part ways. No Exception: nobody may go on after it."""


@dataclass(frozen=True)
class Message:
    """The leader's word before a step."""

    submitted: list[bytes]  # requests
    cancelled: list[int]  # by number, in the order they were submitted
    unpinned: list[Unpinned]
    state: int  # of its scheduler and store, which are those of the others


class Leader:
    """Tells the other processes what its engine is asked."""

    def __init__(self, scheduler: Scheduler, parts: dict[str, Any], send: Callable[[bytes], None]) -> None:
        """parts: what requests refer to and every process has, by name: "config", "store", …"""
        self.scheduler, self.store, self.send = scheduler, parts["store"], send
        self.open = True  # until the engine is closed
        self.names = {id(part): name for name, part in parts.items() if part is not None}
        self.messages: dict[Request, bytes] = {}  # of those that are not sent yet
        self.numbers: dict[Request, int] = {}  # of those that are
        self.count, self.unpinned = count(), deque[Unpinned]()
        seed = secrets.token_bytes(16)
        send(seed)
        _join(scheduler, self.store, seed, self.agree)

    def prepare(self, request: Request) -> None:
        """Make the message about a request that will be submitted; raise why there can be none."""
        if request.continues or request.keeps_cache or request.progress:
            raise CacheMisuse(
                "several processes share this model, and none can keep a cache or report progress by itself; use "
                "submit, or pin for a text with many questions."
            )
        self.messages[request] = self._pickled(request)

    def _pickled(self, request: Request) -> bytes:
        names = [each.name for each in fields(request) if each.name not in OF_THE_LEADER]
        out = io.BytesIO()
        pickler = pickle.Pickler(out)
        pickler.persistent_id = self._name  # type: ignore[method-assign]
        pickler.dump({name: getattr(request, name) for name in names})
        return out.getvalue()

    def _name(self, part: Any) -> str | bytes | None:
        """Name what every process has, or can make."""
        if isinstance(part, SequenceConfig) and id(part) not in self.names:
            return pickle.dumps((part.method, part.budget))
        return self.names.get(id(part))

    def agree(self, news: News) -> News:
        if not self.open:
            return news
        submitted, cancelled = news
        messages = [self.messages.pop(request) for request in submitted]
        self.numbers = {request: number for request, number in self.numbers.items() if not request.done}
        self.numbers |= {request: next(self.count) for request in submitted}
        unpinned = list(self.unpinned)
        told = Message(messages, [self.numbers[each] for each in cancelled], unpinned, _state(self.scheduler))
        self.send(pickle.dumps(told))
        _unpin(self.store, unpinned)
        for _ in unpinned:
            self.unpinned.popleft()  # which ends the wait of `Driver.unpin`
        return news


class Follower:
    """Steps when the leader tells it to."""

    def __init__(self, scheduler: Scheduler, parts: dict[str, Any], receive: Callable[[], bytes]) -> None:
        self.scheduler, self.parts, self.receive = scheduler, parts, receive
        self.config = lru_cache(MOST_CONFIGS)(self._config)
        self.requests: dict[int, Request] = {}
        self.count = count()
        _join(scheduler, parts["store"], receive(), self.agree)

    def agree(self, _: News) -> News:
        told: Message = pickle.loads(self.receive())
        if told.state != _state(self.scheduler):
            raise OutOfStep("it has other requests, tokens or prefixes than the first process")
        submitted = [self._request(message) for message in told.submitted]
        self.requests = {number: each for number, each in self.requests.items() if not each.done}
        self.requests |= {next(self.count): each for each in submitted}
        _unpin(self.parts["store"], told.unpinned)
        return submitted, [self.requests[number] for number in told.cancelled]

    def _request(self, message: bytes) -> Request:
        unpickler = pickle.Unpickler(io.BytesIO(message))
        unpickler.persistent_load = self._part  # type: ignore[method-assign]
        return Request(**unpickler.load())

    def _part(self, name: str | bytes) -> Any:
        return self.parts[name] if isinstance(name, str) else self.config(name)

    def _config(self, pickled: bytes) -> SequenceConfig:
        """Requests of one method and budget have one config, as where they come from."""
        method, budget = pickle.loads(pickled)
        return replace(self.parts["config"], method=method, budget=budget)


def _join(scheduler: Scheduler, store: Store, seed: bytes, agree: Callable[[News], News]) -> None:
    """Join the other processes. seed: of the names of stored texts, which are the same in all of them"""
    scheduler.agree, scheduler.held.check_alike = agree, _check_alike
    sources = (hashlib.sha256(seed + number.to_bytes(8, "big")) for number in count())
    store.new_id = lambda: base64.urlsafe_b64encode(next(sources).digest()[:24]).decode()


def _check_alike(error: Exception) -> None:
    if isinstance(error, ALONE) and not isinstance(error, KvkeepError):
        raise OutOfStep(f"{type(error).__name__}: {error}") from error


def _unpin(store: Store, texts: list[Unpinned]) -> None:
    for each in texts:
        with suppress(KeyError):  # removed twice
            store.remove(*each)


def _state(scheduler: Scheduler) -> int:
    """A number that differs as soon as two processes do."""
    held, store = scheduler.held, scheduler.memory.store
    requests = [(len(each.ids), len(each.answer.ids), each.answer.ids[-1:]) for each in held.taken]
    rows = [len(each.requests) for each in held.batches.values()]
    return zlib.crc32(repr((requests, rows, [each.nbytes for each in store.entries.values()])).encode())
