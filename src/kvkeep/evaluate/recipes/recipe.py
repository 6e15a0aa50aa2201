"""A table or figure of a paper as a value: models, tasks, methods and budgets, and every number it prints.

They are in the .yaml files beside this one. A row of `numbers` is as it is printed: in the order of the
columns, "?" where there is no number to read (it is run all the same), "-" where nothing was run. `points` are what a
figure draws: under a head such as "Llama3 @64 128" every label at every budget, with a number only where one is
printed. Every row of the paper's own method stands there once for each of the paper's `variants`: the end of its label,
and parameters. Texts are ours, numbers the paper's. `jobs` makes grids that cover a recipe, with no config twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

from kvkeep.errors import BadInput, UnknownName
from kvkeep.evaluate.results import grouped
from kvkeep.evaluate.tasks.ruler import GROUPS
from kvkeep.registry import did_you_mean

PAPERS = ("intentkv", "intelllm", "ahakv", "actqkv", "protokv")
Budget = int | float | None
Yarn = tuple[float, int]  # a factor, and the context length in tokens that the model has without it
Point = tuple[str, int | None]  # a task, and its length where it is generated


@dataclass(frozen=True)
class Column:
    """A column's name, and the tasks it is the mean of."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Cell:
    """One printed number, or one point of a figure."""

    group: str  # the model's name in the paper; what else rows are grouped by, where no model is scored
    label: str  # the method's name in the paper
    spec: str | None  # the same method here; None: kvkeep does not have it
    budget: Budget
    column: str
    number: float | None = None  # None: drawn, not printed
    beside: bool = False  # a variant beside the row that is printed


@dataclass(frozen=True)
class Recipe:
    """One table or figure, and how to make it again."""

    name: str
    shows: str
    kind: Literal["scores", "measure", "facts"] = "scores"
    models: Mapping[str, str] = field(default_factory=dict)  # the paper's name -> the hub's
    protocol: str = "aware"
    columns: tuple[Column, ...] = ()
    average: str = ""  # the name of the column that averages all tasks
    cells: tuple[Cell, ...] = ()
    command: str = ""  # of a measurement
    small: Mapping[str, Any] | str | None = None  # what changes on the default model; of a measurement, its command
    notes: tuple[str, ...] = ()
    misprints: tuple[Mapping[str, Any], ...] = ()
    budgets: Mapping[Any, Any] = field(default_factory=dict)  # printed -> used, where they differ
    limit: int | None = None  # samples of each task
    max_length: int | None = None  # tokens beyond which a prompt is truncated
    beyond_window: bool = False  # no truncation for methods that extend the context length
    others: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # task -> label -> another method for it
    counted: bool = False  # what is shown is how often which number is answered
    schedule: str = "prompt"  # "own": answers are evicted from as each method does while decoding
    yarn: Mapping[str, Yarn] = field(default_factory=dict)  # the paper's model -> how its context is lengthened
    variants: Mapping[str, str] = field(default_factory=lambda: {"": ""})  # the end of a label -> parameters

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def spec(self, cell: Cell, task: str) -> str | None:
        """The method that answers a task for a cell."""
        return self.others.get(task, {}).get(cell.label, cell.spec)


def names() -> list[str]:
    return [f"{paper}/{table}" for paper in PAPERS for table in _read(paper)["tables"]]


def recipe(name: str) -> Recipe:
    """A recipe by its name; "intentkv/figure7" is "intentkv/figure6-8"."""
    name = next((each for each in names() if _is_part(name, each)), name)
    if name not in names():
        raise UnknownName(f"there is no recipe '{name}'.{did_you_mean(name, names())} See `kvkeep reproduce --list`.")
    paper, _, table = name.partition("/")
    read = _read(paper)
    return _recipe(name, read["methods"], {"variants": read["variants"], **read["tables"][table]})


def _is_part(name: str, figures: str) -> bool:
    """Whether a figure is one of a range of them."""
    paper, first, last = re.fullmatch(r"(.*?)(\d*)-?(\d*)", figures).groups()  # type: ignore[union-attr]
    number = name.removeprefix(paper)
    return bool(last) and number.isdigit() and int(first) <= int(number) <= int(last)


def shrink(recipe: Recipe) -> Recipe:
    """The same on the default model: few short samples, budgets in proportion, beside one model's printed numbers."""
    if recipe.small is None or isinstance(recipe.small, str):
        raise BadInput(f"'{recipe.name}' has no small variant.")
    small = dict(recipe.small)
    group = next(iter(recipe.models))
    columns, specs, budgets = _columns(small.pop("columns")), small.pop("methods", {}), small.pop("budgets", {})
    specs = {_add(old, more): _add(new, more) for old, new in specs.items() for more in ("", *recipe.variants.values())}
    shown = {column.name for column in columns}
    cells = tuple(
        replace(cell, spec=specs.get(cell.spec, cell.spec))
        for cell in recipe.cells
        if cell.group == group and cell.column in shown and (cell.budget is None or cell.budget in budgets)
    )
    changed = {"models": {group: "default"}, "columns": columns, "cells": cells, "budgets": budgets, **small}
    if "others" in small:
        changed["others"] = _others(small["others"], recipe)
    return replace(recipe, average="", small=None, yarn={}, **changed)


@cache
def _read(paper: str) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(Path(__file__).with_name(f"{paper}.yaml").read_text(encoding="utf-8"))


def _recipe(name: str, shared: Mapping[str, str], table: dict[str, Any]) -> Recipe:
    methods: dict[str, str | None] = {**shared, **table.pop("methods", {})}
    if table.get("kind") == "measure":
        table |= _measured(name, table)
    columns, average = _columns(table.pop("columns", {})), table.get("average", "")
    if average:
        everything = tuple(point for column in columns for point in column.points)
        columns = (*columns, Column(average, everything))
    points, numbers = table.pop("points", {}), table.pop("numbers", {})
    unread = "? " * len(columns)  # what a row of points would print
    drawn = [(head, dict.fromkeys(labels, unread)) for head, labels in points.items()]
    every = (cell for head, rows in [*drawn, *numbers.items()] for cell in _cells(head, rows, methods, columns))
    cells = {replace(cell, number=None): cell for cell in every}
    lists: dict[str, Any] = {key: tuple(table.pop(key, ())) for key in ("notes", "misprints")}
    others = table.pop("others", {})
    made = Recipe(name, columns=columns, **lists, **table)
    varied = tuple(each for cell in cells.values() for each in _varied(cell, made, methods))
    return replace(made, cells=varied, others=_others(others, made))


def _varied(cell: Cell, recipe: Recipe, methods: Mapping[str, str | None]) -> Iterator[Cell]:
    """The cell, and beside it the variants of the paper's own method; one that is null among `methods` is left out."""
    paper = recipe.name.partition("/")[0]
    if cell.spec is None or re.split("[:+]", cell.spec)[0] != paper:
        yield cell
        return
    for end, more in recipe.variants.items():
        label = cell.label + end
        if methods.get(label, "") is not None:
            yield replace(cell, label=label, spec=_add(cell.spec, more), beside=bool(end))


def _others(others: Mapping[str, Mapping[str, str]], recipe: Recipe) -> dict[str, dict[str, str]]:
    """Methods for single tasks, in every variant."""
    return {
        task: {label + end: _add(spec, more) for label, spec in specs.items() for end, more in recipe.variants.items()}
        for task, specs in others.items()
    }


def _add(spec: str, more: str) -> str:
    """ "protokv:chunks=500+recall" with "votes=raw" as "protokv:chunks=500:votes=raw+recall"."""
    method, plus, modifiers = spec.partition("+")
    return f"{method}:{more}{plus}{modifiers}" if more else spec


def _measured(name: str, table: dict[str, Any]) -> dict[str, str]:
    """How a figure is measured that names no command: by benchmarks/figures.py, over texts of --data or --haystack."""
    texts = table.pop("texts", "data")
    if "command" in table:
        return {}
    script, (model,) = f"python benchmarks/figures.py {name} --{texts} DIR", table["models"].values()
    return {"command": f"{script} --model {model} --device cuda", "small": f"{script} --small"}


def _columns(tasks_by_name: Mapping[str, str | None]) -> tuple[Column, ...]:
    return tuple(Column(str(name), tuple(_points(tasks or ""))) for name, tasks in tasks_by_name.items())


def _points(tasks: str) -> Iterator[Point]:
    """ "niah@4096 longbench/qasper" as tasks and lengths."""
    for each in tasks.split():
        name, _, length = each.partition("@")
        for task in GROUPS.get(name, [name]):
            yield task, int(length) if length else None


def _cells(
    head: str, rows: Mapping[str, Any], methods: Mapping[str, str | None], columns: tuple[Column, ...]
) -> Iterator[Cell]:
    """The rows under a head such as "Llama3.1 @4096"; where tasks are scored, every label has a method or null."""
    group, budgets = _head(head)
    for budget, (label, numbers) in product(budgets, rows.items()):
        for column, number in zip(columns, str(numbers).split(), strict=True):
            spec = methods[label] if column.points else None
            if number != "-":
                kept = None if spec == "full" else budget
                yield Cell(group, str(label), spec, kept, column.name, None if number == "?" else float(number))


def _head(head: str) -> tuple[str, list[Budget]]:
    """ "Llama3 @64 128" as what rows are grouped by, and its budgets."""
    group, _, sizes = head.partition(" @")
    return group, [float(size) if "." in size else int(size) for size in sizes.split()] or [None]


Asked = tuple[tuple[str, Budget], ...]  # methods with their budgets, in the table's order


@dataclass(frozen=True)
class Job:
    """One grid: every method with every budget on every task."""

    group: str  # the model's name in the paper
    model: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]  # of generated tasks
    methods: tuple[str, ...]
    budgets: tuple[int | float, ...]
    yarn: float | None = None  # the factor by which the model's context length is lengthened

    @property
    def answers(self) -> int:
        """The number of answers to one sample of each task."""
        configs = sum(1 if method == "full" else len(self.budgets) for method in self.methods)
        return configs * len(self.tasks) * max(1, len(self.lengths))


def jobs(recipe: Recipe) -> list[Job]:
    """Make as few grids as possible."""
    return [
        Job(group, recipe.models[group], tasks, lengths, methods, budgets, yarn)
        for group in recipe.models
        for yarn, points in _by_yarn(_asked(recipe, group), recipe.yarn.get(group))
        for tasks, lengths, asked in _samples(points)
        for methods, budgets in _grids(asked)
    ]


def used(recipe: Recipe, cell: Cell) -> Budget:
    """The budget a cell is run with."""
    return recipe.budgets.get(cell.budget, cell.budget)


def _asked(recipe: Recipe, group: str) -> dict[Point, Asked]:
    cells = [cell for cell in recipe.cells if cell.group == group]
    places = ((cell, point) for cell in cells for point in recipe.column(cell.column).points)
    asked = grouped(
        (point, (spec, used(recipe, cell))) for cell, point in places if (spec := recipe.spec(cell, point[0]))
    )
    return {point: tuple(dict.fromkeys(found)) for point, found in asked.items()}


def _by_yarn(asked: Mapping[Point, Asked], yarn: Yarn | None) -> Iterable[tuple[float | None, dict[Point, Asked]]]:
    """Texts beyond the model's own context length apart from shorter ones, which are read without YaRN.

    Tasks from files count as beyond.
    """
    if yarn is None:
        return [(None, dict(asked))]
    factor, trained = yarn
    short = {point: found for point, found in asked.items() if point[1] is not None and point[1] <= trained}
    return [(None, short), (factor, {point: found for point, found in asked.items() if point not in short})]


def _samples(asked: Mapping[Point, Asked]) -> Iterable[tuple[tuple[str, ...], tuple[int, ...], Asked]]:
    """Tasks with the same lengths and configs, together."""
    lengths = grouped(((task, found), length) for (task, length), found in asked.items())
    tasks = grouped(((tuple(filter(None, sizes)), found), task) for (task, found), sizes in lengths.items())
    return [(tuple(names), sizes, found) for (sizes, found), names in tasks.items()]


def _grids(asked: Asked) -> Iterable[tuple[tuple[str, ...], tuple[int | float, ...]]]:
    """Methods with the same budgets, together; `full` goes with the first."""
    budgets = grouped(asked)
    grids = grouped(
        (tuple(sorted(size for size in sizes if size is not None)), method) for method, sizes in budgets.items()
    )
    free = grids.pop((), [])
    first, *rest = grids or {(): []}
    return [((*free, *grids.get(first, [])), first), *((tuple(grids[each]), each) for each in rest)]
