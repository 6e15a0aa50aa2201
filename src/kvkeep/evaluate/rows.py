"""A file of rows that survives being killed: one JSON line each, on disk before the next is begun."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput

KEY = ("task", "id", "protocol", "method", "budget")


class Rows:
    """Append-only. A line that was cut off by a crash is taken away when the file is opened again."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        make_folder(self.path.parent)
        self.rows = self._whole()
        self.done = {key(row) for row in self.rows}
        if len(self.done) != len(self.rows):
            raise BadInput(f"{str(path)!r} holds the same row twice, so not from one run; use another folder.")

    def _whole(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(self.path, end)
        try:
            return [json.loads(line) for line in content[:end].splitlines()]
        except json.JSONDecodeError as error:
            raise BadInput(f"{str(self.path)!r} is damaged ({error}); move it away to begin anew.") from None

    def add(self, row: dict[str, Any]) -> None:
        """Written and on disk when this returns; one that is there already stays as it is."""
        if key(row) in self.done:
            return
        line = json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n"
        try:
            with self.path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise no_room(self.path, error, f"its {len(self.rows)} rows") from error
        self.rows.append(row)
        self.done.add(key(row))


def no_room(path: str | Path, error: OSError, safe: str) -> BadInput:
    """What to say of a file that cannot be written; safe: what is lost in no case."""
    return BadInput(
        f"{str(path)!r} cannot be written ({error.strerror}); {safe} are safe: make room, and start again to go on."
    )


def make_folder(path: str | Path) -> Path:
    """There when this returns, or named in an error."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{str(path)!r} cannot be made a folder ({error.strerror}); give another.") from None
    return Path(path)


def key(row: dict[str, Any]) -> tuple:
    return tuple(row[name] for name in KEY)
