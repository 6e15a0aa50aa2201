"""/v1/contexts: texts that are compressed once, for any number of requests. Each belongs to a key, or is public."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from kvkeep.engine.prefix_store import Entry
from kvkeep.errors import UnknownName
from kvkeep.serve.failure import Failure
from kvkeep.serve.schemas import ContextRequest
from kvkeep.serve.server import Server


async def create(server: Server, owner: str, asked: ContextRequest) -> dict[str, Any]:
    """Its prefill takes turns with the answers under way, and counts as one of them.

    A key's limits are checked again when its size is known: others may have been made meanwhile.
    """
    before = [each.nbytes for each in server.store().pinned_by(owner)]
    server.limits.check_contexts([*before, 0])
    job = asked.job()
    place = server.admit(owner, job)
    try:
        server.check_characters(asked.text, job)
        pin = partial(server.engine.pin, asked.text, key=owner, public=asked.public, **job.options)
        made = server.find_context(owner, await asyncio.to_thread(pin))
        try:
            server.limits.check_contexts([each.nbytes for each in server.store().pinned_by(owner)])
        except Failure:
            await asyncio.to_thread(server.engine.unpin, made.id, key=owner)
            raise
        return _object(made)
    finally:
        place.close()


def visible(server: Server, owner: str) -> list[dict[str, Any]]:
    """Those of this owner, and public ones."""
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
        server.engine.unpin(name, key=owner)
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
