"""OpenAI's responses API: a response whose output items are messages and function calls, stored to be continued."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvkeep.serve.answers import Answers, Piece
from kvkeep.serve.chat_schemas import Message, ResponseRequest
from kvkeep.serve.failure import Failure
from kvkeep.serve.replies import Object, TokenBytes, logprobs_of
from kvkeep.serve.tools import ToolCall

Keep = Callable[[Object, list[Message]], None]
MOST_RESPONSES = 1000  # of one key
MOST_BYTES = 32_000_000  # the same


@dataclass(eq=False)
class ResponseReply:
    """One answer: its text is the first output item, each call is one of its own."""

    done = ""  # the last event says it

    body: ResponseRequest
    answers: Answers
    bytes_of: TokenBytes
    keep: Keep  # told of the response when it is complete, and of its conversation

    def __post_init__(self) -> None:
        self.id = f"resp_{secrets.token_hex(12)}"
        self.message_id = f"msg_{secrets.token_hex(12)}"
        self.place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}  # of the message's text
        self.sequence = 0
        self.so_far = Piece(0)

    def whole(self, pieces: list[Piece]) -> Object:
        return self._complete(pieces[0])

    def _complete(self, piece: Piece) -> Object:
        response = self._response(piece)
        if self.body.store is not False:
            self.keep(response, self.body.conversation(response["output"]))
        return response

    def begin(self) -> Iterator[Object]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response(self.so_far))

    def events(self, piece: Piece) -> Iterator[Object]:
        if piece.text and not self.so_far.text:
            yield from self._begin_message()
        self.so_far += piece
        if piece.text:
            logprobs = logprobs_of(piece.logprobs, self.bytes_of)
            yield self._event("response.output_text.delta", **self.place, delta=piece.text, logprobs=logprobs)
        if piece.finish and self.so_far.text:
            yield from self._end_message()
        if piece.finish:
            for number, call in enumerate(self.so_far.calls, bool(self.so_far.text)):
                yield from self._call_events(number, call)

    def end(self) -> Iterator[Object]:
        response = self._complete(self.so_far)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, failure: Failure) -> Object:
        error = failure.as_dict()["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def _event(self, kind: str, **fields: Any) -> Object:
        self.sequence += 1
        return {"type": kind, "sequence_number": self.sequence - 1, **fields}

    def _begin_message(self) -> Iterator[Object]:
        empty = self._message(Piece(0), "in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=0, item=empty)
        yield self._event("response.content_part.added", **self.place, part=self._part(Piece(0)))

    def _end_message(self) -> Iterator[Object]:
        part = self._part(self.so_far)
        fields = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._event("response.output_text.done", **self.place, **fields)
        yield self._event("response.content_part.done", **self.place, part=part)
        item = self._message(self.so_far, self._status(self.so_far))
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _call_events(self, number: int, call: ToolCall) -> Iterator[Object]:
        item = _call_item(call)
        place = {"item_id": item["id"], "output_index": number}
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=number, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **place, arguments=call.arguments, name=call.name)
        yield self._event("response.output_item.done", output_index=number, item=item)

    def _status(self, piece: Piece) -> str:
        return {None: "in_progress", "length": "incomplete"}.get(piece.finish, "completed")

    def _response(self, piece: Piece) -> Object:
        status = self._status(piece)
        body = self.body
        used = self.answers.usage
        usage = {
            "input_tokens": used.prompt,
            "input_tokens_details": {"cached_tokens": used.cached, "cache_write_tokens": 0},
            "output_tokens": used.answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.prompt + used.answer,
            "kvkeep": used.kept,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.answers.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": self._output(piece, status) if piece.finish else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": body.options()["temperature"],
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else "auto",
            "tools": [{"strict": False, "parameters": None, **tool.model_dump()} for tool in body.tools or ()],
            "top_p": body.options()["top_p"],
            "usage": usage if piece.finish else None,
        }

    def _output(self, piece: Piece, status: str) -> list[Object]:
        message = [self._message(piece, status)] if piece.text or not piece.calls else []
        return [*message, *(_call_item(call) for call in piece.calls)]

    def _message(self, piece: Piece, status: str) -> Object:
        content = [self._part(piece)]
        return {"id": self.message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, piece: Piece) -> Object:
        logprobs = logprobs_of(piece.logprobs, self.bytes_of)
        return {"type": "output_text", "text": piece.text, "annotations": [], "logprobs": logprobs}


def _call_item(call: ToolCall) -> Object:
    fields = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
    return {"type": "function_call", "id": call.id.replace("call_", "fc_"), **fields}


@dataclass(frozen=True)
class StoredResponse:
    response: dict[str, Any]  # as it was sent
    messages: list[Message]  # of the conversation up to it, its own output included
    nbytes: int


class ResponseStore:
    """Keeps responses in memory, for the event loop's thread."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.by_owner: dict[str, OrderedDict[str, StoredResponse]] = {}

    def put(self, owner: str, response: dict[str, Any], messages: list[Message]) -> None:
        """Store it, and drop those that were not asked for the longest, until the rest is within the limits."""
        nbytes = sum(len(message.model_dump_json()) for message in messages) + len(repr(response))
        found = self.by_owner.setdefault(owner, OrderedDict())
        found[response["id"]] = StoredResponse(response, messages, nbytes)
        while len(found) > self.most or sum(each.nbytes for each in found.values()) > self.most_bytes:
            found.popitem(last=False)

    def get(self, owner: str, id: str, param: str | None = None) -> StoredResponse:
        """Find a response. param: the field that names it, if one does"""
        found = self.by_owner.get(owner, OrderedDict())
        if id not in found:
            said = f"there is no response {id!r}, or it is not yours; it may have expired: send the whole conversation."
            raise Failure(404, said, "response_not_found", param)
        found.move_to_end(id)
        return found[id]

    def remove(self, owner: str, id: str) -> None:
        self.get(owner, id)
        del self.by_owner[owner][id]
