"""Bodies of requests with limits: to parse a large one keeps the interpreter, in any thread, and all others wait."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from weakref import WeakValueDictionary

from kvkeep.serve.failure import Failure

LARGE = 100_000  # bytes
Turns = WeakValueDictionary[str, asyncio.Lock]  # by key, or by address where there are no keys
MOST_CONTAINERS = 50_000  # objects and lists of a body: a million takes a second to parse


class LimitedBody:
    """The body of one request, as it comes in. Large ones of one client are parsed one at a time.

    Its turn lasts from the end of the body until the app answers, or listens whether the client has gone. The next one
    comes after a pause of the same length, in which others are served.
    """

    def __init__(self, scope: Any, receive: Any, max_body: int, turns: Turns) -> None:
        """turns: of all clients"""
        self.scope, self.source, self.max_body, self.turns = scope, receive, max_body, turns
        self.parts: list[bytes] = []
        self.size = 0
        self.turn: asyncio.Lock | None = None  # while it is ours
        self.began = 0.0

    async def receive(self) -> Any:
        self.end_turn()
        message = await self.source()
        part = message.get("body", b"")
        self.size += len(part)
        if self.size > self.max_body:
            raise Failure(413, f"the body has more than {self.max_body} bytes; send less.", "body_too_large")
        self.parts.append(part)
        if self.size > LARGE and message["type"] == "http.request" and not message.get("more_body"):
            await self._begin_turn()
            check_containers(b"".join(self.parts))
            self.parts.clear()
        return message

    async def _begin_turn(self) -> None:
        client = self.scope["state"].get("owner") or (self.scope.get("client") or [""])[0]
        turn = self.turns.setdefault(client, asyncio.Lock())
        await turn.acquire()
        self.turn, self.began = turn, time.perf_counter()

    def end_turn(self) -> None:
        if self.turn is not None:
            asyncio.get_running_loop().call_later(time.perf_counter() - self.began, self.turn.release)
            self.turn = None


def check_containers(body: bytes) -> None:
    """Refuse JSON with too many objects and lists; those within texts do not count."""
    if _num_containers(body) <= MOST_CONTAINERS:
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if _num_containers(b"".join(unescaped.split(b'"')[::2])) > MOST_CONTAINERS:
        said = f"the body has more than {MOST_CONTAINERS} objects and lists; send fewer."
        raise Failure(400, said, "body_too_large")


def _num_containers(json: bytes) -> int:
    return json.count(b"[") + json.count(b"{")
