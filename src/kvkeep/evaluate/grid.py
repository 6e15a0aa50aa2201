"""Task × method × budget × protocol -> rows. One reading of a text serves every method, budget and question it can.

rows.jsonl holds what is the same whenever it is measured, so a run that was killed and continued ends with the same
file; times.jsonl holds what was timed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from kvkeep.compress.method import check_budget
from kvkeep.compress.parse import parse
from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate.prefill import Cell
from kvkeep.evaluate.prompt import PROTOCOLS
from kvkeep.evaluate.results import Rows, alone
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.worker import Answered, Answerer, Item, versions

Answers = Callable[[Sequence[Item]], Iterable[Iterable[Answered]]]  # in order, for rows that always are


@dataclass(frozen=True)
class Grid:
    """What every sample is answered with."""

    methods: tuple[str, ...]
    budgets: tuple[int | float, ...]
    protocols: tuple[str, ...] = PROTOCOLS

    def __post_init__(self) -> None:
        for name in self.protocols:
            if name not in PROTOCOLS:
                raise BadParameter(f"protocol '{name}' is not known; use {' or '.join(PROTOCOLS)}.")
        for method, budget in self.cells:
            if budget is not None:
                parse(method).check(check_budget(budget))

    @property
    def cells(self) -> list[Cell]:
        """Methods with each budget; what keeps everything has none."""
        cells: list[Cell] = []
        for method in self.methods:
            known = parse(method)
            cells += product([method], self.budgets if known.scorer or known.recall else [None])
        return list(dict.fromkeys(cells))


def run(
    answer: Answerer | Answers,
    samples: Sequence[Sample],
    grid: Grid,
    out: str | Path,
    progress: Callable[[int, int], None] | None = None,
    about: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Answer what is not answered yet. about: what else decides a row, the model say. -> all rows"""
    check_ids(samples)
    with alone(out):
        return _run(answer, samples, grid, out, progress, about)


def _run(
    answer: Answerer | Answers,
    samples: Sequence[Sample],
    grid: Grid,
    out: str | Path,
    progress: Callable[[int, int], None] | None,
    about: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    rows, times = Rows(Path(out) / "rows.jsonl"), Rows(Path(out) / "times.jsonl", timed=True)
    stamps = {(sample.task, sample.id): {**(about or {}), "sample": digest(sample)} for sample in samples}
    check_stamps(rows, stamps, out)
    every = items(samples, grid.protocols)
    wanted = {key for item in every for key in keys(item, grid)}
    if strange := len(rows.done - wanted):
        raise BadInput(f"{str(out)!r} holds {strange} rows that are not of this run; use a folder of its own.")
    todo = [item for item in every if not keys(item, grid) <= rows.done]
    for found in (answer(item) for item in todo) if isinstance(answer, Answerer) else answer(todo):
        for row, timed in found:
            times.add(timed)
            rows.add(row | stamps[row["task"], row["id"]])
        if progress:
            progress(len(rows.rows), len(wanted))
    if rows.done != wanted:
        raise BadInput(f"{str(out)!r} holds {len(rows.done)} rows, this run has {len(wanted)}.")
    return rows.rows


def items(samples: Sequence[Sample], protocols: Sequence[str]) -> list[Item]:
    """In the order of the samples; those that ask about the same text before they are known come together.

    Where a question is all there is, it is known: such samples have one protocol.
    """
    found: dict[tuple, list[Sample]] = {}
    for sample, protocol in product(samples, protocols):
        if not sample.context and protocol != protocols[-1]:
            continue
        known = "aware" if not sample.context else protocol
        text = (sample.id,) if known == "aware" or sample.choices else (sample.context, sample.chat)
        found.setdefault((known, sample.task, *text), []).append(sample)
    return [Item(place[0], tuple(mine)) for place, mine in found.items()]


def keys(item: Item, grid: Grid) -> set[tuple]:
    """Of the rows an item gives."""
    places = ((sample.task, sample.id, item.protocol) for sample in item.samples)
    return {(*place, *cell) for place, cell in product(places, grid.cells)}


def digest(sample: Sample) -> str:
    """Of all that is asked: two samples of one id may come from other data, or another seed."""
    return hashlib.sha256(repr(sample).encode()).hexdigest()[:16]


def check_stamps(rows: Rows, stamps: Mapping[tuple[str, str], Mapping[str, Any]], out: str | Path) -> None:
    """What is there already must be what this run would write."""
    for row in rows.rows:
        wanted = {"packages": versions(), **stamps.get((row["task"], row["id"]), {})}
        for name, value in wanted.items():
            if row.get(name) != value:
                raise BadInput(
                    f"{str(out)!r} holds {row['task']} '{row['id']}' of another run ({name} {row.get(name)!r}, here "
                    f"{value!r}); use a folder of its own."
                )


def check_ids(samples: Sequence[Sample]) -> None:
    seen: set[tuple[str, str]] = set()
    for sample in samples:
        if (sample.task, sample.id) in seen:
            raise BadInput(f"{sample.task} has the id '{sample.id}' twice; give every sample its own.")
        seen.add((sample.task, sample.id))
