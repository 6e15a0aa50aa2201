"""Responses that were answered, for requests that continue them: each belongs to a key, and the least used go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kvkeep.serve.chat_schemas import Message
from kvkeep.serve.failure import Failure

MOST_RESPONSES = 1000  # of one key
MOST_BYTES = 32_000_000  # the same


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
