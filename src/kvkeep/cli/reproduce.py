"""`kvkeep reproduce`: a table or figure of one of the papers, its numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from kvkeep.cli import eval as evaluation
from kvkeep.cli import show
from kvkeep.cli.options import ReproduceOptions
from kvkeep.errors import NoData
from kvkeep.evaluate.recipes.compare import Line, compare, counts
from kvkeep.evaluate.recipes.recipe import Job, Recipe, jobs, names, recipe, shrink
from kvkeep.evaluate.summary import write_lines

KINDS = {"scores": "scores", "measure": "measured by a script", "facts": "not an experiment"}
LISTED = """\
scores                run here, the paper's numbers beside ours
measured by a script  `kvkeep reproduce NAME` has what the paper prints, and the command
not an experiment     a drawing, a formula or a list: there is nothing to run"""
SMALL = "Small: another model, other lengths and budgets, few samples. At best the order may be compared."


Plan = list[tuple[Job, evaluation.EvalOptions]]


def reproduce(name: str, options: ReproduceOptions) -> None:
    """Run a recipe and print the comparison; of kinds that are not scores, print the facts."""
    wanted = recipe(name)
    if wanted.kind != "scores":
        _print_facts(wanted, options.small)
        return
    wanted = _changed(wanted, options)
    out = Path(options.out or f"reproduce/{name}{'-small' if options.small else ''}")
    plan = [
        (job, _eval_options(wanted, job, out / f"{number}-{job.model.rpartition('/')[2]}", options))
        for number, job in enumerate(jobs(wanted), 1)
    ]
    if not options.dry_run:
        _with_data(plan, lambda _, each: evaluation.check(each))  # a wrong one is refused before the first is run
    _introduce(wanted, options)
    if options.dry_run:
        _print_plan(plan)
        return
    rows = _run(plan)
    lines = compare(wanted, rows)
    _print_lines(lines, wanted)
    if wanted.counted:
        _print_counts(rows)
    write_lines(Line, lines, out / "comparison.csv")
    typer.echo(f"{len(lines)} numbers in {out / 'comparison.csv'}, rows beside it")


def print_names() -> None:
    """Every table and figure of every paper, and its kind."""
    rows = [[each.name, _kind(each), each.shows] for each in map(recipe, names())]
    show.print_table(["name", "kind", "shows"], rows)
    typer.echo(LISTED)


def _kind(each: Recipe) -> str:
    drawn = each.kind == "scores" and all(cell.number is None for cell in each.cells)
    return KINDS[each.kind] + (", none printed" if drawn else "")


def _changed(wanted: Recipe, options: ReproduceOptions) -> Recipe:
    """Change the recipe by the options: small, another model, fewer samples, another schedule or YaRN."""
    wanted = shrink(wanted) if options.small else wanted
    if options.model:  # beside the numbers that are printed for one model, the first
        group = next(iter(wanted.models))
        cells = tuple(cell for cell in wanted.cells if cell.group == group)
        wanted = replace(wanted, models={group: options.model}, cells=cells, yarn={})
    if options.yarn:
        wanted = replace(wanted, yarn=dict.fromkeys(wanted.models, (options.yarn, 0)))
    schedule = options.schedule or wanted.schedule
    return replace(wanted, limit=options.limit or wanted.limit, schedule=schedule)


def _eval_options(wanted: Recipe, job: Job, out: Path, options: ReproduceOptions) -> evaluation.EvalOptions:
    places = {key: getattr(options, key) for key in ("data", "haystack", "squad", "hotpotqa", "ray", "device", "dtype")}
    sizes: dict[str, Any] = {"budget": job.budgets, "length": job.lengths, "yarn": job.yarn}
    sizes |= {key: getattr(wanted, key) for key in ("limit", "max_length", "beyond_window", "schedule")}
    given = {key: value for key, value in {**places, **sizes}.items() if value}
    return evaluation.EvalOptions(job.tasks, str(out), job.methods, protocol=wanted.protocol, model=job.model, **given)


def _with_data(plan: Plan, act: Callable[[Job, evaluation.EvalOptions], object]) -> list[NoData]:
    """Do something with each grid. -> why some are left out: they have no data, which is an error if all have none"""
    failed: list[NoData] = []
    for job, each in plan:
        try:
            act(job, each)
        except NoData as error:
            failed.append(error)
    if failed and len(failed) == len(plan):
        raise failed[0]
    return failed


def _run(plan: Plan) -> dict[str, list[dict[str, Any]]]:
    """Rows of each model, by its name in the paper."""
    rows: dict[str, list[dict[str, Any]]] = {}

    def run(job: Job, each: evaluation.EvalOptions) -> None:
        with show.busy("starting") as say:
            found, skipped = evaluation.run(each, say)
        rows.setdefault(job.group, []).extend(found)
        for task, why in skipped.items():
            typer.echo(f"left out: {task} {why}", err=True)

    for why in map(str, _with_data(plan, run)):
        typer.echo(f"left out: {why}", err=True)
    return rows


def _print_facts(wanted: Recipe, small: bool) -> None:
    typer.echo(f"{wanted.name}: {wanted.shows}")
    if wanted.kind == "facts":
        typer.echo("Not an experiment: there is nothing to run.")
        return
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for cell in wanted.cells:
        rows.setdefault((cell.group, cell.label), {})[cell.column] = _number(cell.number)
    columns = [column.name for column in wanted.columns]
    table = [[*key, *(row.get(column, "–") for column in columns)] for key, row in rows.items()]
    if table:
        show.print_table(["paper", "", *columns], table)
    else:
        typer.echo("The paper prints no number of it.")
    _remark(wanted)
    typer.echo(f"To measure it here: {wanted.small if small else wanted.command}")


def _introduce(wanted: Recipe, options: ReproduceOptions) -> None:
    typer.echo(f"{wanted.name}: {wanted.shows}")
    if wanted.schedule == "own":
        typer.echo("Answers are evicted from as each method does while decoding (schedule own).")
    typer.echo(f"Protocol: {wanted.protocol}. Models: {', '.join(f'{m} (for {g})' for g, m in wanted.models.items())}.")
    if options.small:
        typer.echo(SMALL)
        for column in wanted.columns:
            typer.echo(f"{column.name} here: {', '.join(map(_point, column.points))}")
    elif options.model:
        typer.echo("Another model than the paper's: only the order may be compared.")
    _remark(wanted)


def _point(point: tuple[str, int | None]) -> str:
    task, length = point
    return f"{task} at {length:,} tokens" if length else task


def _remark(wanted: Recipe) -> None:
    for note in wanted.notes:
        typer.echo(f"Note: {note}")
    for each in wanted.misprints:
        says = each.get("says") or f"the mean of its row is {each['mean']:g}"
        typer.echo(f"Misprint: {each['at']}: {says}")


def _print_plan(plan: Plan) -> None:
    for number, (job, each) in enumerate(plan, 1):
        answers = (
            f"{job.answers * each.limit:,} answers"
            if each.limit
            else f"{job.answers:,} answers to one sample of each task"
        )
        stretched = f", YaRN × {job.yarn:g}" if job.yarn else ""
        typer.echo(f"\n{number}. {job.model}{stretched}: {answers}, in {each.out}")
        typer.echo(f"   tasks    {', '.join(job.tasks)}")
        if job.lengths:
            typer.echo(f"   lengths  {', '.join(map(str, job.lengths))}")
        typer.echo(f"   methods  {', '.join(job.methods)}")
        typer.echo(f"   budgets  {', '.join(map(str, job.budgets)) or '–'}")


def _print_lines(lines: list[Line], wanted: Recipe) -> None:
    """A table for each model: every printed number or drawn point, and ours."""
    for group, model in wanted.models.items():
        typer.echo(f"\n{group} in the paper, {model} here")
        rows = [_cells(line) for line in lines if line.model == group]
        show.print_table(["method", "budget", "column", "paper", "ours [95 %]", "n"], rows)


def _cells(line: Line) -> list[str]:
    budget = "–" if line.budget is None else str(line.budget)
    if line.used != line.budget:
        budget += f" → {line.used}"
    if line.ours is None:
        return [line.method, budget, line.column, _number(line.paper), line.why, "–"]
    ours = f"{line.ours:.1f} [{line.low:.0f}, {line.high:.0f}]"
    n = f"{line.n} ({line.tasks})" if line.tasks else str(line.n)
    return [line.method, budget, line.column, _number(line.paper), ours, n]


def _number(printed: float | None) -> str:
    return "–" if printed is None else f"{printed:g}"


def _print_counts(rows: Mapping[str, Iterable[dict[str, Any]]]) -> None:
    for group, found in ((group, counts(some)) for group, some in rows.items()):
        typer.echo(f"\n{group} in the paper: how often which number is answered here")
        said = sorted({number for each in found.values() for number in each}, key=lambda n: (n is None, n or 0))
        table = [["none" if n is None else str(n), *(str(each[n]) for each in found.values())] for n in said]
        show.print_table(["number", *found], table)
