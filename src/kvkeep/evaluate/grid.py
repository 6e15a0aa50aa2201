"""Task × method × budget × protocol -> result rows. One prefill serves every method, budget and question it can.

rows.jsonl holds what is deterministic, so a run that was killed and continued ends with the same file; times.jsonl
holds timings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from kvkeep.compress.parse import parse, parse_budget
from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate.item import Item, TimedRow, versions
from kvkeep.evaluate.prefill import Config
from kvkeep.evaluate.prompt import PROTOCOLS
from kvkeep.evaluate.results import Results, exclusive_lock
from kvkeep.evaluate.sample import Sample, Turn
from kvkeep.evaluate.talk import HISTORIES, VIAS
from kvkeep.evaluate.worker import Worker

TALKS = tuple(f"{via}-{history}" for via, history in product(VIAS, HISTORIES))
MapItems = Callable[[Sequence[Item]], Iterable[Iterable[TimedRow]]]  # in order, so that rows.jsonl is too


@dataclass(frozen=True)
class Grid:
    """Every method with every budget, under every protocol; conversations in every way."""

    methods: tuple[str, ...]
    budgets: tuple[int | float | str, ...]
    protocols: tuple[str, ...] = PROTOCOLS
    talks: tuple[str, ...] = ("submit-host",)  # the protocols of conversations: call and history

    def __post_init__(self) -> None:
        for name in self.protocols:
            if name not in PROTOCOLS:
                raise BadParameter(f"protocol '{name}' is not known; use {' or '.join(PROTOCOLS)}.")
        for name in self.talks:
            if name not in TALKS:
                raise BadParameter(f"conversations cannot be held by '{name}'; use {', '.join(TALKS)}.")
        for method, budget in self.configs:
            if budget is not None:
                parse_budget(method, budget)

    @property
    def configs(self) -> list[Config]:
        """Methods with each budget; "full" has none."""
        configs: list[Config] = []
        for method in self.methods:
            known = parse(method)
            configs += product([method], self.budgets if known.scorer or known.retrieval else [None])
        return list(dict.fromkeys(configs))


def run(
    answer: Worker | MapItems,
    samples: Sequence[Sample],
    grid: Grid,
    out: str | Path,
    progress: Callable[[int, int], None] | None = None,
    about: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Answer the samples that have no row yet. about: what else decides a row, e.g. the model. -> all rows"""
    check_ids(samples)
    with exclusive_lock(out):
        rows, times = Results(Path(out) / "rows.jsonl"), Results(Path(out) / "times.jsonl", timed=True)
        stamps = {(sample.task, sample.id): {**(about or {}), "sample": digest(sample)} for sample in samples}
        check_stamps(rows, stamps, out)
        every = items(samples, grid.protocols, grid.talks)
        expected = {key for item in every for key in keys(item, grid)}
        if foreign := len(rows.done - expected):
            raise BadInput(f"{str(out)!r} holds {foreign} rows that are not of this run; use a folder of its own.")
        todo = [item for item in every if not keys(item, grid) <= rows.done]
        for found in (answer(item) for item in todo) if isinstance(answer, Worker) else answer(todo):
            for row, timed in found:
                times.add(timed)
                rows.add(row | stamps[row["task"], row["id"]])
            if progress:
                progress(len(rows.rows), len(expected))
        if rows.done != expected:
            raise BadInput(f"{str(out)!r} holds {len(rows.done)} rows, this run has {len(expected)}.")
        return rows.rows


def items(samples: Sequence[Sample], protocols: Sequence[str], talks: Sequence[str] = ()) -> list[Item]:
    """Group samples in their order; query-agnostic ones about the same context come together, and so do turns.

    A sample without a context has one protocol, aware.
    """
    found: dict[tuple, list[Sample]] = {}
    asked = ((sample, protocol) for sample in samples for protocol in _protocols(sample, protocols, talks))
    for sample, protocol in asked:
        text = (sample.id,) if protocol == "aware" or sample.choices else (sample.context, sample.chat)
        found.setdefault((protocol, sample.task, *text), []).append(sample)
    return [Item(key[0], tuple(mine)) for key, mine in found.items()]


def _protocols(sample: Sample, protocols: Sequence[str], talks: Sequence[str]) -> Sequence[str]:
    if isinstance(sample, Turn):
        return talks
    return protocols if sample.context else ("aware",)


def keys(item: Item, grid: Grid) -> set[tuple]:
    """The keys of the rows that an item yields."""
    places = ((sample.task, sample.id, item.protocol) for sample in item.samples)
    return {(*place, *config) for place, config in product(places, grid.configs)}


def digest(sample: Sample) -> str:
    """Hash the whole sample: two samples of one id may come from other data, or another seed."""
    return hashlib.sha256(repr(sample).encode()).hexdigest()[:16]


def check_stamps(rows: Results, stamps: Mapping[tuple[str, str], Mapping[str, Any]], out: str | Path) -> None:
    """Rows that are there already must be those this run would write."""
    for row in rows.rows:
        expected = {"packages": versions(), **stamps.get((row["task"], row["id"]), {})}
        for name, value in expected.items():
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
