"""Around every HTTP request: an id, the limit of its body, its place in /metrics, and errors without traces."""

from __future__ import annotations

import json
import logging
import secrets
import traceback
from typing import Any

from kvkeep.serve.failure import Failure, failure_of
from kvkeep.serve.metrics import Metrics

log = logging.getLogger("kvkeep.serve")
Scope = Any
UNKNOWN = "unknown"  # paths we do not have are counted as one


def report(error: BaseException) -> Failure:
    """What the client is told; the log gets the way to an error that is ours, without what it says of the prompt."""
    failure = failure_of(error)
    if failure.status_code == 500:
        way = [f"{at.filename}:{at.lineno} in {at.name}" for at in traceback.extract_tb(error.__traceback__)]
        log.error("%s at\n%s", type(error).__name__, "\n".join(way))
    return failure


class Gate:
    def __init__(self, app: Any, metrics: Metrics, max_body: int) -> None:
        self.app, self.metrics, self.max_body = app, metrics, max_body

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request_id, size, status = secrets.token_hex(12), 0, 0

        async def limited() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_body:
                raise Failure(413, f"the body has more than {self.max_body} bytes; send less.", "body_too_large")
            return message

        async def named(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, limited, named)
        except Exception as error:
            failure = report(error)
            if not status:
                await _send(failure, named)
        finally:
            path = getattr(scope.get("route"), "path", UNKNOWN)
            self.metrics.requests.labels(path, str(status)).inc()


async def _send(failure: Failure, send: Any) -> None:
    body = json.dumps(failure.as_dict()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": failure.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
