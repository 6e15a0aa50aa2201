"""OpenAI's objects for answers: whole, or as the events of a stream."""

from __future__ import annotations

import json
import secrets
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from kvkeep.engine.sampling import TokenLogprobs
from kvkeep.serve.answers import Answers, Piece
from kvkeep.serve.failure import Failure
from kvkeep.serve.schemas import Body
from kvkeep.serve.tools import ToolCall

Object = dict[str, Any]
TokenBytes = Callable[[int], bytes]


class Reply(Protocol):
    """One API's way to say the same: made for one job."""

    def whole(self, pieces: list[Piece]) -> Object: ...
    def begin(self) -> Iterator[Object]: ...  # events before the first piece
    def events(self, piece: Piece) -> Iterator[Object]: ...
    def end(self) -> Iterator[Object]: ...  # events after the last
    def failed(self, failure: Failure) -> Object: ...

    done: str  # the last line of a stream


async def stream(reply: Reply, answers: Answers, failure_of: Callable[[Exception], Failure]) -> AsyncIterator[str]:
    """Server-sent events. Its status is sent before the answer, so what goes wrong later is an event, too."""
    try:
        yield _lines(reply.begin())
        async for piece in answers.pieces():
            yield _lines(reply.events(piece))
        yield _lines(reply.end())
    except Exception as error:
        yield _lines([reply.failed(failure_of(error))])
    yield reply.done


def _lines(events: Iterable[Object]) -> str:
    """The responses API names its events."""
    named = [(f"event: {event['type']}\n" if "type" in event else "", event) for event in events]
    return "".join(f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n" for name, event in named)


@dataclass(eq=False)
class CompletionReply:
    """text_completion"""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    done = "data: [DONE]\n\n"

    body: Body
    answers: Answers
    bytes_of: TokenBytes

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.offsets = [0] * len(self.answers.answers)  # characters of each answer so far
        self.calls = [0] * len(self.answers.answers)  # tool calls of each answer so far

    def whole(self, pieces: list[Piece]) -> Object:
        return self._object(self.kind, [self._choice(piece) for piece in pieces], usage=usage(self.answers))

    def begin(self) -> Iterator[Object]:
        yield from ()

    def events(self, piece: Piece) -> Iterator[Object]:
        yield self._streamed(self._chunk(piece))
        self.offsets[piece.index] += len(piece.text)
        self.calls[piece.index] += len(piece.calls)

    def end(self) -> Iterator[Object]:
        if self.body.include_usage:
            yield self._object(self.chunk_kind, [], usage=usage(self.answers))

    def failed(self, failure: Failure) -> Object:
        return failure.as_dict()

    def _streamed(self, choice: Object) -> Object:
        """A chunk of a stream; who asks for usage is told that it comes later."""
        later = {"usage": None} if self.body.include_usage else {}
        return self._object(self.chunk_kind, [choice], **later)

    def _object(self, kind: str, choices: list[Object], **more: Any) -> Object:
        named = {"id": self.id, "object": kind, "created": self.answers.created, "model": self.body.model}
        return named | {"system_fingerprint": self.answers.fingerprint, "choices": choices} | more

    def _choice(self, piece: Piece) -> Object:
        logprobs = self._logprobs(piece) if piece.logprobs else None
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    _chunk = _choice

    def _logprobs(self, piece: Piece) -> Object:
        """Tokens side by side, with where each begins."""
        raw = [self.bytes_of(each.token) for each in piece.logprobs]
        decoder = getincrementaldecoder("utf-8")("ignore")
        ends = accumulate((len(decoder.decode(each)) for each in raw), initial=self.offsets[piece.index])
        return {
            "tokens": [shown(each) for each in raw],
            "token_logprobs": [each.logprob for each in piece.logprobs],
            "top_logprobs": [{shown(self.bytes_of(t)): value for t, value in each.top} for each in piece.logprobs],
            "text_offset": list(ends)[:-1],
        }


class ChatReply(CompletionReply):
    """chat.completion, and chat.completion.chunk in a stream"""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def begin(self) -> Iterator[Object]:
        first = {"role": "assistant", "content": ""}
        for index in range(len(self.answers.answers)):
            yield self._streamed(self._with("delta", first, Piece(index)))

    def _choice(self, piece: Piece) -> Object:
        message: Object = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": [_tool_call(call) for call in piece.calls]}
        return self._with("message", message, piece)

    def _chunk(self, piece: Piece) -> Object:
        delta: Object = {"content": piece.text} if piece.text else {}
        if piece.calls:
            numbered = enumerate(piece.calls, self.calls[piece.index])
            delta["tool_calls"] = [{"index": number, **_tool_call(call)} for number, call in numbered]
        return self._with("delta", delta, piece)

    def _with(self, name: str, message: Object, piece: Piece) -> Object:
        logprobs = {"content": logprobs_of(piece.logprobs, self.bytes_of), "refusal": None} if piece.logprobs else None
        return {"index": piece.index, name: message, "logprobs": logprobs, "finish_reason": piece.finish}


def _tool_call(call: ToolCall) -> Object:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprobs_of(tokens: list[TokenLogprobs], bytes_of: TokenBytes) -> list[Object]:
    """The logprobs of chats and responses: each token with the likeliest in its place."""

    def entry(token: int, logprob: float) -> Object:
        raw = bytes_of(token)
        return {"token": shown(raw), "logprob": logprob, "bytes": list(raw)}

    return [entry(e.token, e.logprob) | {"top_logprobs": [entry(*top) for top in e.top]} for e in tokens]


def shown(raw: bytes) -> str:
    r"""A token's text; of part of a character its bytes, as OpenAI does: bytes:\\xe2\\x80"""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def usage(answers: Answers) -> Object:
    """OpenAI's counts, and ours: what is kept of the prompts."""
    found = answers.usage
    return {
        "prompt_tokens": found.prompt,
        "completion_tokens": found.answer,
        "total_tokens": found.prompt + found.answer,
        "prompt_tokens_details": {"cached_tokens": found.cached},
        "kvkeep": found.kept,
    }
