"""The HTTP API: every route hands a job to the server, and says the answers in OpenAI's words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

import kvkeep
from kvkeep.errors import KvkeepError, UnknownName
from kvkeep.serve.answers import Answers
from kvkeep.serve.chat_schemas import ChatRequest, ResponseRequest, TokenizeRequest
from kvkeep.serve.failure import Failure, failure_of, invalid
from kvkeep.serve.middleware import RequestMiddleware, report
from kvkeep.serve.replies import ChatReply, CompletionReply, Reply, stream
from kvkeep.serve.response_reply import ResponseReply
from kvkeep.serve.schemas import CompletionRequest, ContextRequest, DetokenizeRequest
from kvkeep.serve.server import Server, context_object

T = TypeVar("T")
LOCAL = ["localhost", "127.0.0.1", "[::1]"]
router = APIRouter()


class Caller:
    """Says who sends a request, and has the server that is asked."""

    def __init__(self, request: Request) -> None:
        self.server: Server = request.app.state.server
        self.owner: str = request.state.owner  # whose key the request has
        self.client = request.client.host if request.client else ""  # the address it comes from
        self.receive, self.state = request.receive, request.state


async def caller_of(request: Request, _: Annotated[Any, Depends(HTTPBearer(auto_error=False))]) -> Caller:
    """Make it in the event loop: what is not async, FastAPI runs in one of forty threads, each with memory of its own.

    _: for the OpenAPI page; the middleware checks the key
    """
    return Caller(request)


From = Annotated[Caller, Depends(caller_of)]


def create_app(server: Server, local_only: bool = False) -> FastAPI:
    """What uvicorn runs. local_only: refuse pages of other sites that a browser here shows"""
    app = FastAPI(title="kvkeep", version=kvkeep.__version__, lifespan=_lifespan)
    app.state.server = server
    app.include_router(router)
    app.add_middleware(
        RequestMiddleware, requests=server.metrics.requests, keys=server.keys, max_body=server.limits.max_body
    )
    if local_only:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL)
    for kind in (HTTPException, KvkeepError):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    return app


async def _failed(_: Request, error: Exception) -> Response:
    return failure_of(error).response()


async def _invalid(_: Request, error: Any) -> Response:
    return invalid(error.errors(), error.body).response()


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await asyncio.to_thread(app.state.server.close)


@router.post("/v1/chat/completions")
async def chat_completions(caller: From, body: ChatRequest) -> Response:
    return await _answer(caller, body, ChatReply)


@router.post("/v1/completions")
async def completions(caller: From, body: CompletionRequest) -> Response:
    return await _answer(caller, body, CompletionReply)


@router.post("/v1/responses")
async def responses(caller: From, body: ResponseRequest) -> Response:
    server, owner = caller.server, caller.owner
    if body.previous_response_id is not None:
        before = server.responses.get(owner, body.previous_response_id, "previous_response_id")
        body.go_on_after(before.messages)
    keep = partial(server.responses.put, owner)
    return await _answer(caller, body, partial(ResponseReply, keep=keep))


@router.get("/v1/responses/{name}")
async def response(caller: From, name: str) -> dict[str, Any]:
    return caller.server.responses.get(caller.owner, name).response


@router.delete("/v1/responses/{name}")
async def delete_response(caller: From, name: str) -> dict[str, Any]:
    caller.server.responses.remove(caller.owner, name)
    return {"id": name, "object": "response", "deleted": True}


@router.post("/tokenize")
async def tokenize(caller: From, body: TokenizeRequest) -> dict[str, Any]:
    return await caller.server.tokenizing(caller.owner or caller.client, caller.server.tokenize, body)


@router.post("/detokenize")
async def detokenize(caller: From, body: DetokenizeRequest) -> dict[str, Any]:
    return await caller.server.tokenizing(caller.owner or caller.client, caller.server.detokenize, body)


async def _answer(caller: Caller, body: Any, kind: Any) -> Response:
    """The life of a job: its answers under way, in the words of one API, to whoever still listens."""
    job = body.job()
    answers = await unless_gone(caller.receive, caller.server.submit(caller.owner, job, caller.client))
    answers.began, caller.state.answers = caller.state.began, answers
    reply: Reply = kind(body, answers, caller.server.grammars.bytes_of)
    if job.stream:
        return EventStream(answers, reply)
    try:
        return JSONResponse(reply.whole(await unless_gone(caller.receive, answers.whole())))
    finally:
        answers.close()


@router.post("/v1/contexts")
async def create_context(caller: From, body: ContextRequest) -> dict[str, Any]:
    return await unless_gone(caller.receive, _create_context(caller, body))


async def _create_context(caller: Caller, body: ContextRequest) -> dict[str, Any]:
    """Prefill a text and store it; the work takes turns with the answers under way, and counts as one of them.

    A key's limits are checked again when the size of the text is known: others may have been made meanwhile. Nothing is
    stored for a client that leaves before.
    """
    server, owner = caller.server, caller.owner
    server.limits.check_contexts([*(each.nbytes for each in server.store().pinned_by(owner)), 0])
    answers = await server.submit(owner, body.job(), caller.client)
    request = answers.answers[0].request
    try:
        await answers.whole()
        made = server.find_context(owner, request.pinned)
        server.limits.check_contexts([each.nbytes for each in server.store().pinned_by(owner)])
    except BaseException:
        server.cancel(request)
        raise
    finally:
        answers.close()
    return context_object(made)


@router.get("/v1/contexts")
async def list_contexts(caller: From) -> dict[str, Any]:
    return {"object": "list", "data": caller.server.contexts(caller.owner)}


@router.get("/v1/contexts/{name}")
async def context(caller: From, name: str) -> dict[str, Any]:
    return context_object(caller.server.find_context(caller.owner, name))


@router.delete("/v1/contexts/{name}")
async def delete_context(caller: From, name: str) -> dict[str, Any]:
    server, owner = caller.server, caller.owner
    await asyncio.to_thread(server.find_context, owner, name)
    try:
        await asyncio.to_thread(server.engine.unpin, name, owner=owner)
    except UnknownName:
        raise Failure(403, f"the context {name!r} is public, and not yours to remove.", "not_owner") from None
    return {"id": name, "object": "context.deleted", "deleted": True}


@router.get("/v1/models")
async def models(caller: From) -> dict[str, Any]:
    return {"object": "list", "data": [caller.server.model_object()]}


@router.get("/v1/models/{name:path}")
async def model(caller: From, name: str) -> dict[str, Any]:
    caller.server.check_model(name)
    return caller.server.model_object()


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": kvkeep.__version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(request.app.state.server.metrics.page(), media_type="text/plain; version=0.0.4")


class EventStream(StreamingResponse):
    """Closes its answers when the client has them, or is gone: also if it never began to read."""

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, reply: Reply) -> None:
        super().__init__(stream(reply, answers, report), headers={"Cache-Control": "no-store"})
        self.answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await unless_gone(receive, self.stream_response(send))
        except ClientDisconnect:
            pass
        finally:
            self.answers.close()


async def unless_gone(receive: Any, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is given up when its client has gone."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
