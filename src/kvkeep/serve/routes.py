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
from kvkeep.serve.chat_schemas import ChatRequest, TokenizeRequest
from kvkeep.serve.failure import Failure, failure_of, invalid
from kvkeep.serve.middleware import RequestMiddleware, report
from kvkeep.serve.replies import ChatReply, CompletionReply, Reply, stream
from kvkeep.serve.response_reply import ResponseReply
from kvkeep.serve.response_schemas import ResponseRequest
from kvkeep.serve.schemas import CompletionRequest, ContextRequest, DetokenizeRequest
from kvkeep.serve.server import Server, context_object

T = TypeVar("T")
LOCAL = ["localhost", "127.0.0.1", "[::1]"]
router = APIRouter()


def _server(request: Request) -> Server:
    return request.app.state.server


def _client(request: Request) -> str:
    """The address it comes from."""
    return request.client.host if request.client else ""


def _owner(request: Request, _: Annotated[Any, Depends(HTTPBearer(auto_error=False))]) -> str:
    """The owner that the middleware found; the bearer is for the OpenAPI page."""
    return request.state.owner


ServerOf = Annotated[Server, Depends(_server)]
Owner = Annotated[str, Depends(_owner)]  # whose key the request has


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
        app.add_exception_handler(kind, lambda request, error: failure_of(error).response())
    app.add_exception_handler(
        RequestValidationError, lambda request, error: invalid(error.errors(), error.body).response()
    )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await asyncio.to_thread(app.state.server.close)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, server: ServerOf, owner: Owner, body: ChatRequest) -> Response:
    return await _answer(request, server, owner, body, ChatReply)


@router.post("/v1/completions")
async def completions(request: Request, server: ServerOf, owner: Owner, body: CompletionRequest) -> Response:
    return await _answer(request, server, owner, body, CompletionReply)


@router.post("/v1/responses")
async def responses(request: Request, server: ServerOf, owner: Owner, body: ResponseRequest) -> Response:
    if body.previous_response_id is not None:
        before = server.responses.get(owner, body.previous_response_id, "previous_response_id")
        body.go_on_after(before.messages)
    keep = partial(server.responses.put, owner)
    return await _answer(request, server, owner, body, partial(ResponseReply, keep=keep))


@router.get("/v1/responses/{name}")
async def response(server: ServerOf, owner: Owner, name: str) -> dict[str, Any]:
    return server.responses.get(owner, name).response


@router.delete("/v1/responses/{name}")
async def delete_response(server: ServerOf, owner: Owner, name: str) -> dict[str, Any]:
    server.responses.remove(owner, name)
    return {"id": name, "object": "response", "deleted": True}


@router.post("/tokenize")
async def tokenize(request: Request, server: ServerOf, owner: Owner, body: TokenizeRequest) -> dict[str, Any]:
    return await server.tokenizing(owner or _client(request), server.tokenize, body)


@router.post("/detokenize")
async def detokenize(request: Request, server: ServerOf, owner: Owner, body: DetokenizeRequest) -> dict[str, Any]:
    return await server.tokenizing(owner or _client(request), server.detokenize, body)


async def _answer(request: Request, server: Server, owner: str, body: Any, kind: Any) -> Response:
    """The life of a job: its answers under way, in the words of one API, to whoever still listens."""
    job = body.job()
    answers = await unless_gone(request.receive, server.submit(owner, job, _client(request)))
    answers.began, request.state.answers = request.state.began, answers
    reply: Reply = kind(body, answers, server.grammars.bytes_of)
    if job.stream:
        return EventStream(answers, reply)
    try:
        return JSONResponse(reply.whole(await unless_gone(request.receive, answers.whole())))
    finally:
        answers.close()


@router.post("/v1/contexts")
async def create_context(request: Request, server: ServerOf, owner: Owner, body: ContextRequest) -> dict[str, Any]:
    return await unless_gone(request.receive, _create_context(server, owner, body, _client(request)))


async def _create_context(server: Server, owner: str, body: ContextRequest, client: str) -> dict[str, Any]:
    """Prefill a text and store it; the work takes turns with the answers under way, and counts as one of them.

    A key's limits are checked again when the size of the text is known: others may have been made meanwhile. Nothing is
    stored for a client that leaves before.
    """
    server.limits.check_contexts([*(each.nbytes for each in server.store().pinned_by(owner)), 0])
    answers = await server.submit(owner, body.job(), client)
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
async def list_contexts(server: ServerOf, owner: Owner) -> dict[str, Any]:
    return {"object": "list", "data": server.contexts(owner)}


@router.get("/v1/contexts/{name}")
async def context(server: ServerOf, owner: Owner, name: str) -> dict[str, Any]:
    return context_object(server.find_context(owner, name))


@router.delete("/v1/contexts/{name}")
async def delete_context(server: ServerOf, owner: Owner, name: str) -> dict[str, Any]:
    await asyncio.to_thread(server.find_context, owner, name)
    try:
        await asyncio.to_thread(server.engine.unpin, name, owner=owner)
    except UnknownName:
        raise Failure(403, f"the context {name!r} is public, and not yours to remove.", "not_owner") from None
    return {"id": name, "object": "context.deleted", "deleted": True}


@router.get("/v1/models")
async def models(server: ServerOf, owner: Owner) -> dict[str, Any]:
    return {"object": "list", "data": [server.model_object()]}


@router.get("/v1/models/{name:path}")
async def model(server: ServerOf, owner: Owner, name: str) -> dict[str, Any]:
    server.check_model(name)
    return server.model_object()


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": kvkeep.__version__}


@router.get("/metrics")
async def metrics(server: ServerOf) -> Response:
    return Response(server.metrics.page(), media_type="text/plain; version=0.0.4")


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
