"""/v1/contexts: texts that are compressed once, for any number of requests.

Each belongs to a key. A public one is for all keys, and belongs to every key that made it: each may remove its own
claim, and the last one removes the text.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvkeep.engine.prefix_store import Entry
from kvkeep.errors import UnknownName
from kvkeep.serve.failure import Failure
from kvkeep.serve.schemas import ContextRequest
from kvkeep.serve.server import Server


async def create(server: Server, owner: str, asked: ContextRequest, client: str = "") -> dict[str, Any]:
    """Prefill a text and store it; the work takes turns with the answers under way, and counts as one of them.

    A key's limits are checked again when the size of the text is known: others may have been made meanwhile. Nothing is
    stored for a client that leaves before.
    """
    server.limits.check_contexts([*(each.nbytes for each in server.store().pinned_by(owner)), 0])
    answers = await server.submit(owner, asked.job(), client)
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
    return _object(made)


def visible(server: Server, owner: str) -> list[dict[str, Any]]:
    """The contexts of this owner, and public ones."""
    found = []
    for name in list(server.store().entries):
        with suppress(Failure):
            found.append(_object(server.find_context(owner, name)))
    return found


def find(server: Server, owner: str, name: str) -> dict[str, Any]:
    return _object(server.find_context(owner, name))


def remove(server: Server, owner: str, name: str) -> dict[str, Any]:
    server.find_context(owner, name)
    try:
        server.engine.unpin(name, owner=owner)
    except UnknownName:
        raise Failure(403, f"the context {name!r} is public, and not yours to remove.", "not_owner") from None
    return {"id": name, "object": "context.deleted", "deleted": True}


def _object(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "object": "context",
        "tokens": len(entry.ids),
        "bytes": entry.nbytes,
        "public": entry.public,
        "kvkeep": {"method": entry.method, "budget": entry.budget},
    }
