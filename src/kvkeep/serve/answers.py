"""The answers to one job, as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from kvkeep.engine.request import Agreement, Request
from kvkeep.engine.sampling import TokenLogprobs
from kvkeep.errors import UnknownName
from kvkeep.serve.failure import Failure, no_context
from kvkeep.serve.tools import ToolCall, ToolParser


@dataclass
class Piece:
    """What is new of one answer; pieces added up are the whole answer."""

    index: int  # of the answer
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None  # why it is complete: "stop", "length", "tool_calls"

    def __iadd__(self, new: Piece) -> Piece:
        self.text += new.text
        self.calls += new.calls
        self.logprobs += new.logprobs
        self.finish = new.finish
        return self

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.logprobs or self.finish)


@dataclass(eq=False)
class Answer:
    """A request of the engine, read by the event loop."""

    index: int
    request: Request
    parser: ToolParser | None
    context: str | None = None
    echo: str = ""  # what its text begins with
    read: int = 0  # tokens whose logprobs were taken
    complete: bool = False

    def take(self) -> Piece:
        """What is new; raises what the request failed with."""
        done = self.request.done  # before its text: then all of it is there
        text = "".join(self.request.deltas.popleft() for _ in range(len(self.request.deltas)))
        if done and self.request.error is not None:
            if self.context and isinstance(self.request.error, KeyError | UnknownName):  # deleted while it waited
                raise no_context(self.context)
            raise self.request.error
        if done and self.request.finish_reason == "cancelled":
            raise Failure(503, "the server is stopping.", "stopping")
        logprobs = self.request.logprobs[self.read :]
        self.read += len(logprobs)
        calls: list[ToolCall] = []
        if self.parser:
            text, calls = self.parser.feed(text, done)
        text, self.echo = self.echo + text, ""
        self.complete = done
        reason = "tool_calls" if self.parser and self.parser.called else self.request.finish_reason
        return Piece(self.index, text, calls, logprobs, reason if done else None)


@dataclass(frozen=True)
class Usage:
    """Tokens of a job; each prompt is counted once."""

    prompt: int
    answer: int
    cached: int  # of the prompts, those that were in the store
    kept: dict[str, Any]  # what is left of the prompts after compression, as replies show it


@dataclass(eq=False)
class Answers:
    """The answers to one job. `close` when the client has them, or is gone."""

    owner: str
    count: int
    on_close: Callable[[Answers], None]
    fingerprint: str = ""  # of the server
    answers: list[Answer] = field(default_factory=list)
    num_prompts: int = 0
    observe: Callable[[Piece], None] = lambda piece: None
    late: bool = False

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.began = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def begin(self, answers: list[Answer], num_prompts: int, max_seconds: float) -> None:
        self.answers, self.num_prompts = answers, num_prompts
        for answer in answers:
            answer.request.notify = self._notify
        self._timer = self._loop.call_later(max_seconds, self._expire)

    def _notify(self) -> None:
        """Wake the event loop; the engine's thread calls this after text was added."""
        if not self._news.is_set():
            self._loop.call_soon_threadsafe(self._news.set)

    def _expire(self) -> None:
        """Its places are free at once, also if its client reads nothing and never gets to `close`."""
        self.late = True
        self._cancel()
        self._news.set()
        self.on_close(self)

    def _cancel(self) -> None:
        """Their rows are free after the engine's current step, for which nobody waits here."""
        for answer in self.answers:
            answer.request.cancelled = True

    async def pieces(self) -> AsyncIterator[Piece]:
        """Give the pieces of all answers in the order they come."""
        while pending := [answer for answer in self.answers if not answer.complete]:
            if self.late:
                raise Failure(408, "the answer took longer than this server allows; ask for fewer tokens.", "timeout")
            self._news.clear()  # before their text is taken: what comes after that is news
            for answer in pending:
                if piece := answer.take():
                    self.observe(piece)
                    yield piece
            if not all(answer.complete for answer in pending):
                await self._news.wait()

    async def whole(self) -> list[Piece]:
        found = [Piece(answer.index) for answer in self.answers]
        async for piece in self.pieces():
            found[piece.index] += piece
        return found

    @property
    def usage(self) -> Usage:
        requests = [answer.request for answer in self.answers]
        prompts = requests[:: len(requests) // self.num_prompts]
        exact = [each.agreement for each in requests if each.how.exact]
        return Usage(
            prompt=sum(len(each.ids) for each in prompts),
            answer=sum(len(each.answer.ids) for each in requests),
            cached=sum(each.num_cached for each in prompts),
            kept={
                "method": requests[0].config.method.name,
                "budget": requests[0].config.budget,
                "kept_tokens": sum(each.kept_tokens for each in prompts),  # per KV head
                "kept_bytes": sum(each.kept_bytes for each in prompts),
                **({"exact": Agreement.total(exact)} if exact else {}),
            },
        )

    def close(self) -> None:
        """Whatever is not complete is cancelled."""
        if self.answers:
            self._timer.cancel()
        self._cancel()
        self.on_close(self)
