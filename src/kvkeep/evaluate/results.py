"""A file of result rows that survives a kill: one JSON line each, on disk before the next is computed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kvkeep.errors import BadInput

try:
    import fcntl
except ImportError:  # not on Windows, where there is no lock
    fcntl = None  # type: ignore[assignment]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
LOCK = ".lock"
KEY = ("task", "id", "protocol", "method", "budget")


@contextmanager
def exclusive_lock(folder: str | Path) -> Iterator[None]:
    """While held, no other process may write to the folder. The system releases the lock of a process that died."""
    if fcntl is None:
        yield
        return
    path = make_folder(folder) / LOCK
    try:
        opened = path.open("a+")
    except OSError as error:
        raise write_error(path, error, "rows that are there") from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "just begun"
            raise BadInput(
                f"{str(folder)!r} is being written by another run ({holder}); wait for it, or use another folder."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


class Results:
    """Append-only. Opening it removes a last line that a crash cut short, and duplicate rows of two runs at once.

    timed: duplicates may differ, the first one stays
    """

    def __init__(self, path: str | Path, timed: bool = False) -> None:
        self.path = Path(path)
        make_folder(self.path.parent)
        found = self._read()
        self.rows = self._deduplicated(found, timed)
        self.done = {key(row) for row in self.rows}
        if len(found) > len(self.rows):
            self._write(self.rows, self.path.with_name(self.path.name + ".new"))

    def _deduplicated(self, found: list[dict[str, Any]], timed: bool) -> list[dict[str, Any]]:
        """The first row of each key; duplicates must be equal."""
        first: dict[tuple, tuple[int, dict[str, Any]]] = {}
        for line, row in enumerate(found, 1):
            kept = first.setdefault(key(row), (line, row))
            if row != kept[1] and not timed:
                raise BadInput(
                    f"{str(self.path)!r} holds {row['task']} '{row['id']}' twice with different outcomes (lines "
                    f"{kept[0]} and {line}), so not from one run; delete both lines and start again to have that row "
                    "answered anew, or use another folder."
                )
        return [row for _, row in first.values()]

    def _write(self, rows: list[dict[str, Any]], draft: Path | None = None) -> None:
        """Append the rows, which are on disk when this returns. draft: a file that takes the place of this one"""
        path = draft or self.path
        try:
            with path.open("wb" if draft else "ab") as file:
                file.writelines((json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n").encode() for row in rows)
                file.flush()
                os.fsync(file.fileno())
            if draft:
                os.replace(draft, self.path)
        except OSError as error:
            raise write_error(self.path, error, f"its {len(self.rows)} rows") from error

    def _read(self) -> list[dict[str, Any]]:
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
        """Write a row, which is on disk when this returns; one whose key is there already is ignored."""
        if key(row) in self.done:
            return
        self._write([row])
        self.rows.append(row)
        self.done.add(key(row))


def write_error(path: str | Path, error: OSError, safe: str) -> BadInput:
    """The error for a file that cannot be written; safe: what is on disk already"""
    return BadInput(
        f"{str(path)!r} cannot be written ({error.strerror}); {safe} are safe: make room, and start again to go on."
    )


def make_folder(path: str | Path) -> Path:
    """Make the folder unless it exists."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{str(path)!r} cannot be made a folder ({error.strerror}); give another.") from None
    return Path(path)


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, keys in the order of their first values."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def key(row: dict[str, Any]) -> tuple:
    return tuple(row[name] for name in KEY)
