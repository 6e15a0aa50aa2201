"""The commands of `kvkeep`; each is a function."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer import Argument, Option

import kvkeep
from kvkeep.cli import eval as evaluation
from kvkeep.cli import inputs, options, show
from kvkeep.errors import BadInput, KvkeepError

EPILOG = "Exit status: 0 done · 2 bad usage or input, said in one line on stderr · 130 interrupted · 1 anything else."


class _Commands(typer.core.TyperGroup):
    """Turns a KvkeepError into one line and an exit status."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """No arguments: --help. `--ray` may have no value, which the parser does not support."""
        args = args or ["--help"]
        ends = [*args[1:], "-"]
        given = [[each, options.LOCAL] if each == "--ray" and after.startswith("-") else [each]
                 for each, after in zip(args, ends, strict=True)]  # fmt: skip
        return super().parse_args(ctx, [part for parts in given for part in parts])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvkeepError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False, epilog=EPILOG)


def main() -> None:
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvkeep {kvkeep.__version__}")
        raise typer.Exit


@app.callback()
def _kvkeep(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Compress the KV cache of long-context language models: evict, quantize, or offload and retrieve.

    Begin with `kvkeep run FILE "A question about it?" --compare`.
    """


@app.command(epilog=EPILOG)
@options.takes(options.RunOptions)
def run(given: options.RunOptions) -> None:
    """Answer a question about a document from a compressed cache, and show what that saved."""
    text, question = inputs.prompt(given.document, given.question)
    inputs.check_model(given.model)
    plans = inputs.plans(given.method, given.budget, given.settings, given.storage)
    if given.compare and all((plan.method, plan.storage) != (show.FULL, None) for plan in plans):
        plans += inputs.plans(show.FULL, given.budget)
    from kvkeep.cli import run as running

    outcomes = running.answers(given, plans, text, question)
    if given.as_json:
        results = [asdict(each) for each in outcomes]  # the first one's fields, and under "results" all of them
        show.print_json({"model": given.model, **results[0], "results": results})
    else:
        show.print_outcomes(outcomes)


@app.command(epilog=EPILOG)
@options.takes(options.InspectOptions)
def inspect(given: options.InspectOptions) -> None:
    """Write a page that shows which words of a document several methods keep. It needs no network."""
    text, question = inputs.prompt(given.document, given.question)
    inputs.check_model(given.model)
    names = list(dict.fromkeys(name.strip() for name in given.methods.split(",")))
    plans = [plan for name in names for plan in inputs.plans(name, given.budget.split(",")[0])]
    from kvkeep.cli import pages

    with show.busy("starting") as say:
        written = pages.inspect(given, text, question, plans, say)
    typer.echo(written)


@app.command(epilog=EPILOG)
@options.takes(options.ChatOptions)
def chat(given: options.ChatOptions) -> None:
    """Chat with a model in the terminal, and see what its cache holds. /new begins again, /quit ends."""
    inputs.check_model(given.model)
    plan = inputs.plans(given.method, given.budget, given.settings, given.storage)[0]
    from kvkeep.cli import run as running

    with show.busy("starting") as say:
        engine = running.load_engine(given, plan, say, prefix_cache=running.PREFIX_BYTES)
    with engine:
        running.chat(engine, given)


@app.command(epilog=EPILOG)
@options.takes(options.ServeOptions)
def serve(given: options.ServeOptions) -> None:
    """Serve a model over OpenAI's HTTP API, with compressed caches."""
    inputs.check_model(given.model)
    from kvkeep.cli import serve as serving

    plan = inputs.plans(given.method, given.budget, given.settings, given.storage)[0]
    with show.busy("starting") as say:
        serving.run(given, plan, say.note)


@app.command(epilog=EPILOG)
@options.takes(options.PlanOptions)
def plan(given: options.PlanOptions) -> None:
    """Print the memory that conversations take on the device and on the host, with and without a history."""
    inputs.check_model(given.model)
    budget = inputs.plans(None, given.budget)[0].budget
    if not isinstance(budget, int | float):
        raise BadInput(f"--budget {given.budget}: how much that keeps depends on the text; give tokens or a fraction.")
    from kvkeep.cli import plan as planning

    facts = planning.table(given, budget)
    if given.as_json:
        show.print_json(facts)
    else:
        typer.echo(planning.text(facts))


@app.command("eval", epilog=EPILOG)
@options.takes(options.EvalArguments)
def evaluate(given: options.EvalArguments) -> None:
    """Score methods on tasks. A run that was stopped goes on where it was."""
    chosen = evaluation.eval_options(given.config, {**vars(given), "config": None})
    inputs.check_model(chosen.model)
    with show.busy("starting") as say:
        rows, skipped = evaluation.run(chosen, say)
    show.print_scores(rows)
    for remark in show.remarks(rows):
        typer.echo(f"note: {remark}", err=True)
    for name, why in skipped.items():
        typer.echo(f"left out: {name} {why}", err=True)
    typer.echo(f"{len(rows)} rows in {chosen.out}: rows.jsonl, times.jsonl, results.csv")


@app.command(epilog=EPILOG)
def report(
    folder: Annotated[str, Argument(help="The folder that `kvkeep eval --out` wrote its rows to.")],
) -> None:
    """Write a page that shows the scores of an evaluation, with pictures and CSV files beside it."""
    from kvkeep.cli import pages

    written, missing = pages.report(folder)
    if missing:
        typer.echo(missing, err=True)
    typer.echo(written)


@app.command(epilog=EPILOG)
@options.takes(options.BenchOptions)
def bench(given: options.BenchOptions) -> None:
    """Measure the time and memory of prefill and decode, beside the full cache and what the machine can do."""
    inputs.check_model("default" if given.shape else given.model)
    from kvkeep.cli import bench as measuring

    with show.busy("starting") as say:
        found, written = measuring.run(given, say)
    typer.echo(measuring.table(found))
    if written:
        typer.echo(written, err=True)


@app.command(epilog=EPILOG)
@options.takes(options.ReproduceOptions)
def reproduce(given: options.ReproduceOptions) -> None:
    """Reproduce a table or figure of one of the five papers, and show its numbers beside ours."""
    from kvkeep.cli import reproduce as recipes

    if given.listing or given.name is None:
        recipes.print_names()
    else:
        recipes.reproduce(given.name, given)


@app.command(epilog=EPILOG)
def methods(
    names: Annotated[
        list[str] | None, Argument(help="List these alone, such as snapkv or +adakv.", show_default="all")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the methods: their papers, what they keep, their parameters, and what they can do."""
    from kvkeep.cli import listing

    listing.print_methods(names or [], as_json)


@app.command(epilog=EPILOG)
def models(as_json: options.AsJson = False) -> None:
    """List models that are good for a start, with what they need; any other on the hub or in a folder works, too."""
    from kvkeep.cli import listing

    listing.print_models(as_json)
