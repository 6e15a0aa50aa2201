"""Errors as OpenAI's API reports them."""

from __future__ import annotations

from typing import Any

import torch
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from kvkeep.errors import KvkeepError, ModelUnavailable, QueueFull, StoreFull

RETRY_AFTER_S = 1
BUSY = {"Retry-After": str(RETRY_AFTER_S)}
MOST_SAID = 600  # characters of an error
IMAGES = "image", "image_url", "input_image"  # types of parts of a message
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Failure(HTTPException):
    """A status and an error object."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, headers: Any = None
    ):
        super().__init__(status, shortened(message, MOST_SAID), headers)
        self.code, self.param = code, param

    def as_dict(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.as_dict(), self.status_code, self.headers)


def shortened(text: str, most: int = 100) -> str:
    """What a client wrote, without repeating megabytes of it."""
    return text if len(text) <= most else text[:most] + "…"


def no_context(name: str) -> Failure:
    return Failure(404, f"there is no context {shortened(name)!r}, or it is not yours.", "context_not_found", "context")


def failure_of(error: BaseException) -> Failure:
    """What a client is told of an error: only what was written for people."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, HTTPException):  # of the router: no such path, or not with this verb
        return Failure(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, QueueFull):
        return Failure(429, str(error), "queue_full", headers=BUSY)
    if isinstance(error, torch.OutOfMemoryError | StoreFull):
        return Failure(
            503, "the server ran out of memory for this request; try again later.", "out_of_memory", headers=BUSY
        )
    if isinstance(error, KvkeepError) and not isinstance(error, ModelUnavailable):
        code = "context_length_exceeded" if "context length" in str(error) else None
        return Failure(400, " ".join(str(error).split()), code)
    return Failure(500, "the server made a mistake; it is in its log.", "internal_error")


def invalid(errors: Any, body: Any = None) -> Failure:
    """Name the first thing that is wrong with a body. Values are not repeated."""
    first = next(iter(errors))
    path, found = _as_written(first["loc"][1:], body)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {shortened(str(first['loc'][-1]))}"
    elif first["type"] == "json_invalid":
        path, message = "", "the body is not valid JSON"
    elif first["type"] == "model_attributes_type" and not path:  # curl sends a form, unless told
        message = "the body should be a JSON object, with the header Content-Type: application/json"
    elif _is_image(found):
        message = f"{path}: images are not supported by this model; send text alone."
    elif path:
        message = f"{path}: {message}"
    return Failure(400, message, param=path.partition(".")[0].partition("[")[0] or None)


def _as_written(location: Any, body: Any) -> tuple[str, Any]:
    """Find a place in the body: its path, as in messages[0].content, and what is there. Our classes are not named."""
    path, last = "", len(location) - 1
    for number, part in enumerate(location):
        if isinstance(part, int):
            if isinstance(body, list) and part < len(body):
                path, body = f"{path}[{part}]", body[part]
        elif isinstance(body, dict) and (part in body or number == last):
            path, body = f"{path}.{shortened(part)}".lstrip("."), body.get(part)
    return path, body


def _is_image(value: Any) -> bool:
    """Whether it is a part of a message that shows an image, or has one."""
    parts = value if isinstance(value, list) else [value]
    return any(isinstance(part, dict) and part.get("type") in IMAGES for part in parts)
