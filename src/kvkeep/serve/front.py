"""The way in to several replicas: requests that begin alike go to the same one, whose store has what they share."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from kvkeep.serve.access import Keys
from kvkeep.serve.failure import BUSY, Failure
from kvkeep.serve.job import beginning
from kvkeep.serve.metrics import FrontMetrics
from kvkeep.serve.middleware import RequestMiddleware
from kvkeep.serve.replica import Message
from kvkeep.serve.routes import LOCAL, unless_gone

CONTEXTS, RESPONSES = "/v1/contexts", "/v1/responses"
RESPONSE_ID = re.compile(rb'"id": ?"(resp_[0-9a-f]+)"')
ID_WITHIN = 200  # bytes of a response, or of the first event of its stream
ALL_S = 10.0  # until all replicas have said what they are asked
EVENTS = b"text/event-stream"
MOST_SESSIONS = 100_000  # of contexts and responses, that are remembered
SCOPE = {
    "type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "root_path", "client",
}  # fmt: skip


class Front:
    """An ASGI app. A request without a replica yet is tried on another one; an answer under way ends with an error."""

    def __init__(self, handle: Any, keys: Keys, max_body: int, local_only: bool = False) -> None:
        """handle: of the deployment; local_only: as of `create_app`"""
        self.handle = handle
        self.metrics = FrontMetrics()
        self.sessions: OrderedDict[str, str] = OrderedDict()  # of contexts and responses, by id
        app = RequestMiddleware(self._route, self.metrics.requests, keys, max_body)
        self.app = TrustedHostMiddleware(app, LOCAL) if local_only else app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    async def _route(self, scope: Any, receive: Any, send: Any) -> None:
        reply: Response
        match scope["method"], scope["path"]:
            case "GET", "/health":
                reply = JSONResponse({"status": "ok"})
            case "GET", "/metrics":
                page = self.metrics.page(await self._ask_all("metrics"))
                reply = Response(page, media_type="text/plain; version=0.0.4")
            case "GET", "/v1/contexts":
                reply = JSONResponse({"object": "list", "data": await self._contexts(scope["state"]["owner"])})
            case _:
                return await self._forward(scope, receive, send)
        await reply(scope, receive, send)

    async def _forward(self, scope: Any, receive: Any, send: Any) -> None:
        owner, body = scope.get("state", {}).get("owner", ""), await Request(scope, receive).body()
        asked = _object(body)
        session = self._session_of(owner, scope["path"], asked)
        request = {name: value for name, value in scope.items() if name in SCOPE}

        async def pass_on() -> None:
            async with aclosing(self._answer(request, body, session)) as messages:
                async for message in messages:
                    if message["type"] == "http.response.body":
                        self._remember(scope["path"], message["body"], session)
                    await send(message)

        await unless_gone(receive, pass_on())

    async def _answer(self, scope: Any, body: bytes, session: str) -> AsyncGenerator[Message, None]:
        """Have the session's replica answer; another one, if that dies before it begins."""
        begun = is_stream = False
        for tries_left in (1, 0):
            replies = self.handle.options(method_name="ask", stream=True, session_id=session).remote(scope, body)
            try:
                async for messages in replies:
                    for message in messages:
                        begun = True
                        is_stream |= dict(message.get("headers", ())).get(b"content-type", b"").startswith(EVENTS)
                        yield message
                return
            except BackPressureError:
                raise Failure(429, "all replicas are busy; try again later.", "queue_full", headers=BUSY) from None
            except (RayError, RayServeException):
                self.metrics.lost.inc()
                if begun or not tries_left:
                    break
            finally:
                replies.cancel()
        lost = Failure(503, "the replica that answered this request has died; ask again.", "replica_lost", headers=BUSY)
        if not begun:
            raise lost
        if not is_stream:
            raise ClientDisconnect  # part of it is sent: closing the connection says so
        yield {"type": "http.response.body", "body": _last_event(scope["path"], lost)}

    def _session_of(self, owner: str, path: str, asked: dict[str, Any]) -> str:
        """The session of the replica that has what is asked for; empty: any replica will do."""
        ours = asked.get("kvkeep")
        named = path.partition(f"{CONTEXTS}/")[2] or path.partition(f"{RESPONSES}/")[2]
        for id in (ours.get("context") if isinstance(ours, dict) else None, asked.get("previous_response_id"), named):
            if isinstance(id, str) and id:
                return self.sessions.get(id, id)
        start = beginning(asked)
        return hashlib.sha256(f"{owner}\n{start}".encode(errors="replace")).hexdigest() if start else ""

    def _remember(self, path: str, made: bytes, session: str) -> None:
        """Remember which replica has a context, or a response."""
        id = _object(made).get("id") if path == CONTEXTS else None
        if path == RESPONSES and (found := RESPONSE_ID.search(made[:ID_WITHIN])):
            id = found[1].decode()
        if isinstance(id, str):
            self.sessions[id] = session
            while len(self.sessions) > MOST_SESSIONS:
                self.sessions.popitem(last=False)

    async def _contexts(self, owner: str) -> list[dict[str, Any]]:
        """The contexts of all replicas; a public one may be on several."""
        found = await self._ask_all("contexts", owner)
        return list({each["id"]: each for part in found for each in part}.values())

    async def _ask_all(self, method: str, *given: Any) -> list[Any]:
        """Ask all replicas. -> what those say that answer"""
        found = await self.handle.broadcast(method, *given).results_async(timeout_s=ALL_S, return_exceptions=True)
        return [each for each in found if not isinstance(each, BaseException)]


def _object(body: bytes) -> dict[str, Any]:
    """Parse an object; empty if it is none: the replica says what is wrong."""
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _last_event(path: str, failure: Failure) -> bytes:
    """The event that ends a stream with a failure, in the words of its API."""
    error = failure.as_dict()["error"]
    if path == RESPONSES:
        said = {name: error[name] for name in ("code", "message", "param")}
        return b"event: error\ndata: " + json.dumps({"type": "error", "sequence_number": 0, **said}).encode() + b"\n\n"
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"
