"""What tells which replica has the prefix of a request in its store."""

from __future__ import annotations

import json
from typing import Any

LONG = 4000  # characters of a beginning that requests have in common


def beginning(asked: dict[str, Any]) -> str:
    """What a request has in common with those of its conversation, or about its long text: the first LONG characters
    of all that comes up to the first message of the user."""
    found = ""
    given = [asked.get(name) for name in ("instructions", "input", "messages", "prompt", "text")]
    parts = [part for each in given for part in (each if isinstance(each, list) else [each]) if part is not None]
    for part in parts[:LONG]:
        found += json.dumps(part, ensure_ascii=False)
        if len(found) >= LONG or (isinstance(part, dict) and part.get("role") == "user"):
            break
    return found[:LONG]
