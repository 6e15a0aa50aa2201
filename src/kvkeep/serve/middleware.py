"""What every HTTP request gets: an id, a check of its key and size, a place in /metrics, errors without traces."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import traceback
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from prometheus_client import Counter
from starlette.requests import ClientDisconnect

from kvkeep.serve.bodies import LimitedBody, Turns
from kvkeep.serve.failure import Failure, failure_of
from kvkeep.serve.keys import Keys

log = logging.getLogger("kvkeep.serve")
access = logging.getLogger("kvkeep.access")  # a line for every request, once somebody wants to see them
Scope = Any
SEND_S = 60.0  # who takes nothing of an answer for so long is gone
CLIENT_GONE = 499  # in /metrics alone, as nginx has it
NEED_KEY = "/v1/", "/tokenize", "/detokenize"
MOST_PATH = 200  # characters in the log
UNKNOWN = "unknown"  # paths we do not have are counted as one


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


class RequestMiddleware:
    def __init__(self, app: Any, requests: Counter, keys: Keys, max_body: int) -> None:
        """requests: by path and status"""
        self.app, self.requests, self.keys, self.max_body = app, requests, keys, max_body
        self.turns = Turns()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
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
                await _send(failure, named)
        finally:
            body.end_turn()
            path = getattr(scope.get("route"), "path", UNKNOWN)
            self.requests.labels(path, str(status)).inc()
            if access.isEnabledFor(logging.INFO):
                access.info(_line(scope, status))


def _line(scope: Scope, status: int) -> str:
    """Who asked for what, how it ended, tokens read and written, and seconds. Nothing of a prompt or a key."""
    state = scope["state"]
    answers = state.get("answers")
    tokens = f"{answers.usage.prompt}+{answers.usage.answer}" if answers and answers.answers else "-"
    path = quote(scope["path"])[:MOST_PATH]
    seconds = time.perf_counter() - state["began"]
    return f"{scope['method']} {path} {status} key={state.get('owner') or '-'} tokens={tokens} {seconds:.3f}s"


async def _send(failure: Failure, send: Any) -> None:
    body = json.dumps(failure.as_dict()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **(failure.headers or {})}
    await send({"type": "http.response.start", "status": failure.status_code, "headers": _encoded(headers)})
    await send({"type": "http.response.body", "body": body})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
