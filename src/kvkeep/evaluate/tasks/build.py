"""Shared by the tasks: templates filled in one pass, and lists of samples with distinct ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.lines import records


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
