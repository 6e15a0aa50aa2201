"""What every HTTP request gets: an id, a check of its key and size, a place in /metrics, errors without traces.

To parse a large body keeps the interpreter, in any thread, and all others wait: so large ones take turns.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import traceback
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

from prometheus_client import Counter
from starlette.requests import ClientDisconnect

from kvkeep.serve.access import Keys
from kvkeep.serve.failure import Failure, failure_of

log = logging.getLogger("kvkeep.serve")
access = logging.getLogger("kvkeep.access")  # a line for every request, once somebody wants to see them
SEND_S = 60.0  # who takes nothing of an answer for so long is gone
CLIENT_GONE = 499  # in /metrics alone, as nginx has it
NEED_KEY = "/v1/", "/tokenize", "/detokenize"
MOST_PATH = 200  # characters in the log
UNKNOWN = "unknown"  # paths we do not have are counted as one
LARGE = 100_000  # bytes
Turns = WeakValueDictionary[str, asyncio.Lock]  # by key, or by address where there are no keys
MOST_CONTAINERS = 50_000  # objects and lists of a body: a million takes a second to parse


def report(error: BaseException) -> Failure:
    """What the client is told; the log gets the way to an error that is ours, without what it says of the prompt."""
    failure = failure_of(error)
    if failure.status_code == 500:
        way = [f"{at.filename}:{at.lineno} in {at.name}" for at in traceback.extract_tb(error.__traceback__)]
        log.error("%s at\n%s", type(error).__name__, "\n".join(way))
    return failure


def owner_of(keys: Keys, headers: dict[bytes, bytes]) -> str:
    """Find whose key the request has."""
    scheme, _, secret = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    found = keys.owner(secret.strip() if scheme.lower() == "bearer" else "")
    if found is None:
        raise Failure(401, "give one of this server's API keys: Authorization: Bearer KEY.", "invalid_api_key")
    return found


@dataclass(eq=False)
class RequestMiddleware:
    app: Any
    requests: Counter  # by path and status
    keys: Keys
    max_body: int
    turns: Turns = field(default_factory=Turns)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request_id, status = secrets.token_hex(12), 0
        scope.setdefault("state", {})["began"] = time.perf_counter()  # clients wait from here on

        async def named(message: Any) -> None:
            nonlocal status
            body.end_turn()
            if message["type"] == "http.response.start":
                status = message["status"]
                if b"x-request-id" not in dict(message["headers"]):  # of a replica
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            try:
                await asyncio.wait_for(send(message), SEND_S)
            except TimeoutError:
                raise ClientDisconnect from None

        body = LimitedBody(scope, receive, self.max_body, self.turns)
        try:
            if scope["path"].startswith(NEED_KEY):  # before anything of the body is read
                scope["state"]["owner"] = owner_of(self.keys, dict(scope["headers"]))
            await self.app(scope, body.receive, named)
        except ClientDisconnect:
            status = status or CLIENT_GONE
        except Exception as error:
            failure = report(error)
            if not status:
                await failure.response()(scope, body.receive, named)
        finally:
            body.end_turn()
            path = getattr(scope.get("route"), "path", UNKNOWN)
            self.requests.labels(path, str(status)).inc()
            if access.isEnabledFor(logging.INFO):
                access.info(_line(scope, status))


def _line(scope: Any, status: int) -> str:
    """Who asked for what, how it ended, tokens read and written, and seconds. Nothing of a prompt or a key."""
    state = scope["state"]
    answers = state.get("answers")
    tokens = f"{answers.usage.prompt}+{answers.usage.answer}" if answers and answers.answers else "-"
    path = quote(scope["path"])[:MOST_PATH]
    seconds = time.perf_counter() - state["began"]
    return f"{scope['method']} {path} {status} key={state.get('owner') or '-'} tokens={tokens} {seconds:.3f}s"


@dataclass(eq=False)
class LimitedBody:
    """The body of one request, as it comes in. Large ones of one client are parsed one at a time.

    Its turn lasts from the end of the body until the app answers, or listens whether the client has gone. The next one
    comes after a pause of the same length, in which others are served.
    """

    scope: Any
    source: Any  # of its messages
    max_body: int
    turns: Turns  # of all clients
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    turn: asyncio.Lock | None = None  # while it is ours
    began: float = 0.0

    async def receive(self) -> Any:
        self.end_turn()
        message = await self.source()
        part = message.get("body", b"")
        self.size += len(part)
        if self.size > self.max_body:
            raise Failure(413, f"the body has more than {self.max_body} bytes; send less.", "body_too_large")
        self.parts.append(part)
        if self.size > LARGE and message["type"] == "http.request" and not message.get("more_body"):
            client = self.scope["state"].get("owner") or (self.scope.get("client") or [""])[0]
            turn = self.turns.setdefault(client, asyncio.Lock())
            await turn.acquire()
            self.turn, self.began = turn, time.perf_counter()
            check_containers(b"".join(self.parts))
            self.parts.clear()
        return message

    def end_turn(self) -> None:
        if self.turn is not None:
            asyncio.get_running_loop().call_later(time.perf_counter() - self.began, self.turn.release)
            self.turn = None


def check_containers(body: bytes) -> None:
    """Refuse JSON with too many objects and lists; those within texts do not count."""
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"')[::2])
    if outside.count(b"[") + outside.count(b"{") > MOST_CONTAINERS:
        said = f"the body has more than {MOST_CONTAINERS} objects and lists; send fewer."
        raise Failure(400, said, "body_too_large")
