"""Shared by the tasks: templates filled in one pass, JSON lines, and lists of samples with distinct ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput
from kvkeep.evaluate.sample import Sample


def read_text(path: str | Path, advice: str = "", option: str = "") -> str:
    """The text of a file in UTF-8. option, advice: what an error begins with, and the way out"""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"{option}{str(path)!r} cannot be read ({error.strerror}){advice}.") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{option}{str(path)!r} is not UTF-8 (byte {error.start}); convert it first.") from None


def fill(template: str, fields: Mapping[str, str]) -> str:
    """{name} becomes the field of that name; braces inside the fields are left alone."""
    return re.sub(r"\{(\w+)\}", lambda found: fields[found[1]], template)


def samples(
    path: str | Path, make: Callable[[dict[str, Any], str, int], Sample], called: str = "samples"
) -> list[Sample]:
    """make(record, where, number) of every line, in order; no two of a task with the same id."""
    made: list[Sample] = []
    seen: dict[tuple[str, str], str] = {}
    for number, (where, record) in enumerate(records(path)):
        sample = make(record, where, number)
        first = seen.setdefault((sample.task, sample.id), where)
        if first != where:
            raise BadInput(f"{where} has the id '{sample.id}' of {first}; give every sample its own.")
        made.append(sample)
    if not made:
        raise BadInput(f"{str(path)!r} has no {called} in it.")
    return made


def identity(record: dict[str, Any], number: int, *names: str) -> str:
    """The first of these fields that is there, else the number of the record in its file."""
    return next((str(record[name]) for name in names if record.get(name) is not None), str(number))


def texts(record: dict[str, Any], where: str, name: str) -> tuple[str, ...]:
    """A field that is a list of texts, at least one."""
    found = record.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(value, str | int | float) for value in found):
        raise BadInput(f"{where} has no list of texts in '{name}'; it has {str(found)[:80]!r}.")
    return tuple(map(str, found))


def records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, record) of every line that is not blank."""
    content, path = read_text(path, "; give a file of JSON lines"), Path(path)
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
