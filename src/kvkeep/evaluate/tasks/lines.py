"""JSON lines; an error names the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput


def records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, record) of every line that is not blank."""
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"{str(path)!r} cannot be read ({error.strerror}); give a file of JSON lines.") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{str(path)!r} is not UTF-8 (byte {error.start}); convert it first.") from None
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            where = f"{path.name}, line {number}"
            yield where, _record(line, where)


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where} is not JSON ({error.msg} at column {error.colno}); mend or remove it.") from None
    if not isinstance(record, dict):
        raise BadInput(f"{where} is not an object; a sample is one JSON object per line.")
    return record


def text(record: dict[str, Any], where: str, *names: str) -> str:
    """The first of these fields that is there."""
    for name in names:
        if isinstance(record.get(name), str | int) and str(record[name]).strip():
            return str(record[name])
    raise BadInput(f"{where} has no {' or '.join(names)}; it has {', '.join(sorted(record))}.")
