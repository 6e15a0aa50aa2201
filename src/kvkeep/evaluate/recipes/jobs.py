"""From a recipe to grids that cover it, with no config twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvkeep.evaluate.recipes.recipe import Budget, Cell, Point, Recipe, Yarn

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
        """To one sample of each task."""
        configs = sum(1 if method == "full" else len(self.budgets) for method in self.methods)
        return configs * len(self.tasks) * max(1, len(self.lengths))


def jobs(recipe: Recipe) -> list[Job]:
    """As few grids as possible."""
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
    asked: dict[Point, dict[tuple[str, Budget], None]] = {}
    for cell in recipe.cells:
        for task, length in recipe.column(cell.column).points if cell.group == group else ():
            spec = recipe.spec(cell, task)
            if spec:
                asked.setdefault((task, length), {})[spec, used(recipe, cell)] = None
    return {point: tuple(found) for point, found in asked.items()}


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
    lengths: dict[tuple[str, Asked], list[int]] = {}
    for (task, length), found in asked.items():
        lengths.setdefault((task, found), []).extend([length] if length else [])
    tasks: dict[tuple[tuple[int, ...], Asked], list[str]] = {}
    for (task, found), sizes in lengths.items():
        tasks.setdefault((tuple(sizes), found), []).append(task)
    return [(tuple(names), sizes, found) for (sizes, found), names in tasks.items()]


def _grids(asked: Asked) -> Iterable[tuple[tuple[str, ...], tuple[int | float, ...]]]:
    """Methods with the same budgets, together; `full` goes with the first."""
    budgets: dict[str, list[int | float]] = {}
    for method, budget in asked:
        budgets.setdefault(method, []).extend([] if budget is None else [budget])
    grids: dict[tuple[int | float, ...], list[str]] = {}
    for method, sizes in budgets.items():
        if sizes:
            grids.setdefault(tuple(sorted(sizes)), []).append(method)
    free = [method for method, sizes in budgets.items() if not sizes]
    first, *rest = grids or {(): []}
    return [((*free, *grids.get(first, [])), first), *((tuple(grids[each]), each) for each in rest)]
