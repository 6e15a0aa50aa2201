"""The paper's number beside ours."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from kvkeep.evaluate import summary
from kvkeep.evaluate.recipes.recipe import Budget, Cell, Point, Recipe, used
from kvkeep.evaluate.tasks.infinitebench import MADE
from kvkeep.evaluate.tasks.ruler import TASKS as RULER

SAME = {"needle": "needle_sandwich"}  # how rows call them


@dataclass(frozen=True)
class Line:
    """One printed number or drawn point, and what was measured for it."""

    model: str
    method: str  # in the paper's words
    spec: str
    budget: Budget
    used: Budget  # what was run in its place
    column: str
    paper: float | None  # None: a figure has it without a number
    ours: float | None = None  # percent, as the interval
    low: float | None = None
    high: float | None = None
    n: int = 0  # samples
    tasks: str = ""  # how many of the column's tasks could be had, if not all
    why: str = ""  # there is nothing


def compare(recipe: Recipe, rows: Mapping[str, Iterable[dict[str, Any]]]) -> list[Line]:
    """rows: of each model, by its name in the paper"""
    found = {
        (group, cell.task, cell.method, cell.budget): cell
        for group, measured in rows.items()
        for cell in summary.summarize(measured)
    }
    return [_line(recipe, cell, found) for cell in recipe.cells]


def counts(rows: Iterable[dict[str, Any]]) -> dict[str, Counter[int | None]]:
    """Count, for each method and budget, how often which number comes first in an answer; None: it has none."""
    found: dict[str, Counter[int | None]] = {}
    for row in rows:
        said = re.search(r"\d+", row["answer"])
        name = row["method"] if row["budget"] is None else f"{row['method']} {row['budget']}"
        found.setdefault(name, Counter())[int(said[0]) if said else None] += 1
    return found


def row_name(point: Point) -> str:
    """What a task is called in rows."""
    task, length = point
    return f"{task}_{length}" if task in RULER or task in MADE else SAME.get(task, task.rpartition("/")[2])


def mean(cells: Sequence[summary.Cell]) -> tuple[float, float, float]:
    """Average the tasks' means; the interval adds the tasks' distances to their own bounds as variances are added."""
    middle = sum(cell.score for cell in cells) / len(cells)
    below = sqrt(sum((cell.score - cell.low) ** 2 for cell in cells)) / len(cells)
    above = sqrt(sum((cell.high - cell.score) ** 2 for cell in cells)) / len(cells)
    return middle, max(0.0, middle - below), min(100.0, middle + above)


def _line(recipe: Recipe, cell: Cell, found: Mapping[tuple, summary.Cell]) -> Line:
    budget = used(recipe, cell)
    place = (cell.group, cell.label, cell.spec or "", cell.budget, budget, cell.column, cell.number)
    if not cell.spec:
        return Line(*place, why="not in kvkeep")
    tasks = {row_name(point): recipe.spec(cell, point[0]) for point in recipe.column(cell.column).points}
    had = [found[key] for task, spec in tasks.items() if (key := (cell.group, task, spec, budget)) in found]
    if not had:
        return Line(*place, why="no data")
    few = f"{len(had)} of {len(tasks)} tasks" if len(had) < len(tasks) else ""
    return Line(*place, *mean(had), n=sum(each.n for each in had), tasks=few)
