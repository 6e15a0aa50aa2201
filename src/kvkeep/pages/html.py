"""One HTML file of a template, its style and scripts, and the facts it shows: nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput

TEMPLATES = files("kvkeep.pages") / "templates"


def page(name: str, facts: Any) -> str:
    """The page `name`, with a dataclass of facts.

    In the template, {{file}} stands for a file beside it, and {{facts}} for the facts as JSON.
    """
    values = {"facts": as_json(facts)}

    def fill(match: re.Match[str]) -> str:
        return values.get(match[1]) or (TEMPLATES / match[1]).read_text(encoding="utf-8")

    return re.sub(r"\{\{([\w.]+)\}\}", fill, (TEMPLATES / f"{name}.html").read_text(encoding="utf-8"))


def as_json(facts: Any) -> str:
    """JSON that a script element may hold: it has no <, so that no text can end the element."""
    text = json.dumps(asdict(facts), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def write_page(path: str | Path, name: str, facts: Any) -> int:
    """-> bytes written"""
    content = page(name, facts).encode("utf-8", "replace")
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise BadInput(f"{str(path)!r} cannot be written ({error.strerror}); give another path.") from None
    return len(content)
