"""The commands: `run`, `inspect`, `chat`, `serve`, `eval`, `report`, `bench`, `reproduce`, `methods`, `models`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import kvkeep
from kvkeep.cli import eval as evaluation
from kvkeep.cli import inputs, options, show
from kvkeep.compress.defaults import BUDGET, CONTEXT_METHODS, DOCUMENT_BUDGET, PROMPT_METHODS
from kvkeep.errors import KvkeepError

INSPECTED = PROMPT_METHODS[0], CONTEXT_METHODS[0], "snapkv"
EPILOG = "Exit status: 0 done · 2 bad usage or input, said in one line on stderr · 130 interrupted · 1 anything else."


class _Commands(typer.core.TyperGroup):
    """Turns a KvkeepError into one line and an exit status."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """No arguments: --help. `--ray` may have no value, which the parser does not support."""
        args = args or ["--help"]
        ends = [*args[1:], "-"]
        given = [[each, evaluation.LOCAL] if each == "--ray" and after.startswith("-") else [each]
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Compress the KV cache of long-context language models: evict, quantize, or offload and retrieve.

    Begin with `kvkeep run FILE "A question about it?" --compare`.
    """


@app.command(epilog=EPILOG)
def run(
    document: options.Document,
    question: options.Question,
    method: options.Method = None,
    budget: Annotated[
        str, typer.Option(help=f"Set {options.TOKENS}; auto keeps what the scores call for. Commas run several.")
    ] = str(DOCUMENT_BUDGET),
    model: options.Model = "default",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop the answer after this many tokens.")] = 64,
    temperature: options.Temperature = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0 takes all.")] = 0,
    settings: options.Settings = None,
    prefill_chunk_size: options.ChunkSize = None,
    storage: options.Storage = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also answer with the full cache, and compare.")] = False,
    as_json: options.AsJson = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    seed: options.Seed = 0,
) -> None:
    """Answer a question about a document from a compressed cache, and show what that saved."""
    text, question = inputs.prompt(document, question)
    inputs.check_model(model)
    plans = inputs.plans(method, budget, settings or [], storage)
    if compare and all((plan.method, plan.storage) != (show.FULL, None) for plan in plans):
        plans += inputs.plans(show.FULL, budget, [])
    from kvkeep.cli.run import QuestionRunner, check_lengths
    from kvkeep.engine.sampling import Generation
    from kvkeep.model.load import check_device

    generation = Generation(max_new_tokens, temperature, top_p, top_k, seed)
    with show.busy("starting") as say:
        check_device(device, dtype)
        check_lengths(model, plans, text, question, max_new_tokens, say)
        runner = QuestionRunner.load(model, device, dtype, say)
        engines = [runner.engine(plan, prefill_chunk_size) for plan in plans]
        runner.warm_up(engines, text, seed, say)
    outcomes = [
        runner.ask(engine, plan, text, question, asdict(generation), None if as_json or number else sys.stdout)
        for number, (engine, plan) in enumerate(zip(engines, plans, strict=True))
    ]
    if as_json:
        show.print_json(show.outcomes_as_dict(model, outcomes))
    else:
        show.print_outcomes(outcomes)


@app.command(epilog=EPILOG)
def inspect(
    document: options.Document,
    question: options.Question,
    methods: Annotated[
        str, typer.Option(help="The methods to compare, by commas; `full` is always among them.")
    ] = ",".join(INSPECTED),
    budget: Annotated[str, typer.Option(help=f"Set {options.TOKENS}; auto keeps what the scores call for.")] = str(
        DOCUMENT_BUDGET
    ),
    out: Annotated[str, typer.Option("--out", "-o", help="Write the page to this HTML file.")] = "inspect.html",
    protocol: Annotated[
        str,
        typer.Option(help="Let methods know the question before they evict (aware), or after they did (agnostic)."),
    ] = "aware",
    model: options.Model = "default",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop every answer after this many tokens.")] = 64,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Write a page that shows which words of a document several methods keep. It needs no network."""
    text, question = inputs.prompt(document, question)
    inputs.check_model(model)
    names = list(dict.fromkeys(name.strip() for name in methods.split(",")))
    plans = [plan for name in names for plan in inputs.plans(name, budget.split(",")[0], [])]
    from kvkeep.cli import pages
    from kvkeep.model.load import check_device
    from kvkeep.pages.inspector import check_protocol

    check_protocol(protocol)
    chosen = pages.Options(model, protocol, max_new_tokens, device, dtype, out)
    with show.busy("starting") as say:
        check_device(device, dtype)
        written = pages.inspect(text, question, plans, chosen, say)
    typer.echo(written)


@app.command(epilog=EPILOG)
def chat(
    model: options.Model = "default",
    method: options.Method = None,
    budget: options.Budget = str(BUDGET),
    settings: options.Settings = None,
    storage: options.Storage = None,
    system: Annotated[str | None, typer.Option(help="Tell the model this before the conversation.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop every answer after this many tokens.")] = 512,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Chat with a model in the terminal, and see what its cache holds. /new begins again, /quit ends."""
    inputs.check_model(model)
    plan = inputs.plans(method, budget, settings or [], storage)[0]
    from kvkeep.cli import run as running

    with show.busy("starting") as say:
        engine = running.load_engine(model, device, dtype, plan, say, method=method, prefix_cache=running.PREFIX_BYTES)
    generation = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    with engine:
        running.chat(engine, system, generation)


@app.command(epilog=EPILOG)
def serve(
    model: Annotated[
        str,
        typer.Option(envvar="KVKEEP_MODEL", help="The model to serve: `default`, a name on the hub, or a folder."),
    ] = "default",
    method: options.Method = None,
    budget: options.Budget = str(BUDGET),
    settings: options.Settings = None,
    storage: options.Storage = None,
    name: Annotated[
        str | None, typer.Option(help="The name that clients call the model by.", show_default="as --model")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Listen on this address; 0.0.0.0 lets other machines in, which then need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen on this port; 0 takes any that is free.")] = 8000,
    keys: Annotated[
        str | None,
        typer.Option(help="Accept the API keys in this file, one on every line; or set KVKEEP_API_KEYS, by commas."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Let other machines in without a key.")] = False,
    memory: Annotated[
        str | None,
        typer.Option(help="All caches together take at most this much: 40GB.", show_default="80 % of what is free"),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Decode at most this many answers at a time.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Let this many requests wait; more are refused with status 429.")
    ] = 1024,
    prefix_cache: Annotated[
        str, typer.Option(help="Keep this much of compressed prefixes, which later requests share; 0 keeps none.")
    ] = "1GB",
    prefix_folder: Annotated[
        str | None, typer.Option(help="Save these prefixes to this folder, so that they survive a restart.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Allow answers of at most this many tokens.")] = 4096,
    max_body: Annotated[str, typer.Option(help="Refuse requests with larger bodies than this.")] = "4MB",
    max_seconds: Annotated[
        float, typer.Option(min=0.1, help="End an answer that is not complete after this many seconds.")
    ] = 600.0,
    max_answers: Annotated[int, typer.Option(min=1, help="Let each key have this many answers under way.")] = 64,
    max_contexts: Annotated[
        int, typer.Option(min=0, help="Let each key store this many texts by POST /v1/contexts.")
    ] = 64,
    max_context_bytes: Annotated[
        str | None,
        typer.Option(
            help="Let the texts of each key take this much.",
            show_default="half of --prefix-cache, where there are several keys",
        ),
    ] = None,
    allow_parameters: Annotated[
        bool,
        typer.Option("--allow-parameters", help="Let clients set parameters of methods; some values take hours."),
    ] = False,
    allow_special_tokens: Annotated[
        bool,
        typer.Option("--allow-special-tokens", help="Read control tokens in clients' messages as such, not as text."),
    ] = False,
    max_connections: Annotated[
        int,
        typer.Option(min=1, help="Hold this many connections open; one more closes the oldest idle or half-open one."),
    ] = 1024,
    header_seconds: Annotated[
        float, typer.Option(min=0.1, help="Close a connection whose request header takes longer than this.")
    ] = 10.0,
    body_seconds: Annotated[
        float, typer.Option(min=0.1, help="Close a connection whose request body takes longer than this.")
    ] = 60.0,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="Log a line for every request, without prompts.")
    ] = True,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Let pages of this origin ask from a browser; repeat it for more.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="After SIGTERM, give answers under way this many seconds to finish.")
    ] = 60.0,
    tensor_parallel: Annotated[
        int,
        typer.Option(min=1, help="Split the model over this many processes, each with a GPU; sizes are per process."),
    ] = 1,
    ray: options.Ray = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="With --ray, run this many engines, each with all of these limits.")
    ] = 1,
    autoscale: Annotated[
        list[str] | None, typer.Option(help="With --ray, set how Ray Serve scales, as name=value: max_replicas=8.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Serve a model over OpenAI's HTTP API, with compressed caches."""
    given = dict(locals())
    inputs.check_model(model)
    from kvkeep.cli import serve as serving

    chosen = given.pop("budget"), given.pop("settings") or [], given.pop("storage")
    plan = inputs.plans(method, *chosen)[0]
    with show.busy("starting") as say:
        lists = {name: tuple(given[name] or ()) for name in ("autoscale", "cors_origin")}
        serving.run(serving.Options(**given | lists), plan, say.note)


@app.command("eval", epilog=EPILOG)
def evaluate(
    tasks: options.Tasks = None,
    out: Annotated[
        str | None, typer.Option(help="Write rows.jsonl, times.jsonl and results.csv to this folder.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="The methods to score, by commas.", show_default=",".join(evaluation.METHODS))
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help=f"Set {options.TOKENS}, or auto; commas run several.", show_default=str(DOCUMENT_BUDGET)),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="Let methods know the question before they evict (aware), or after they did (agnostic).",
            show_default="both",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model to score: `default`, a name on the hub, or a folder.", show_default="default"),
    ] = None,
    length: Annotated[
        str | None, typer.Option(help="Make prompts of this many tokens; commas run several.", show_default="4096")
    ] = None,
    limit: options.Limit = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed the tasks that are made.", show_default="42")] = None,
    data: options.Data = None,
    haystack: options.Haystack = None,
    squad: options.Squad = None,
    hotpotqa: options.HotpotQA = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Truncate prompts to this many tokens.", show_default="the model's context length"),
    ] = None,
    beyond_window: Annotated[
        bool | None,
        typer.Option("--beyond-window", help="Truncate nothing for methods that extend the context length."),
    ] = None,
    schedule: options.Schedule = None,
    yarn: options.Yarn = None,
    share: Annotated[
        bool | None,
        typer.Option("--share/--alone", help="Share one prefill and one decode batch, or run every config by itself."),
    ] = None,
    ray: options.Ray = None,
    config: Annotated[Path | None, typer.Option(help="Read any of these options from this YAML file.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Score methods on tasks. A run that was stopped goes on where it was."""
    given = {name: value for name, value in locals().items() if name != "config"}
    chosen = evaluation.eval_options(config, given)
    inputs.check_model(chosen.model)
    with show.counting("starting") as (say, note):
        rows, skipped = evaluation.run(chosen, say, note)
    show.print_scores(rows)
    for remark in show.remarks(rows):
        typer.echo(f"note: {remark}", err=True)
    for name, why in skipped.items():
        typer.echo(f"left out: {name} {why}", err=True)
    typer.echo(f"{len(rows)} rows in {chosen.out}: rows.jsonl, times.jsonl, results.csv")


@app.command(epilog=EPILOG)
def report(
    folder: Annotated[str, typer.Argument(help="The folder that `kvkeep eval --out` wrote its rows to.")],
) -> None:
    """Write a page that shows the scores of an evaluation, with pictures and CSV files beside it."""
    from kvkeep.cli import pages

    written, missing = pages.report(folder)
    if missing:
        typer.echo(missing, err=True)
    typer.echo(written)


@app.command(epilog=EPILOG)
def bench(
    methods: Annotated[str, typer.Option(help="The methods to measure, by commas.")] = PROMPT_METHODS[0],
    budget: Annotated[str, typer.Option(help=f"Set {options.TOKENS}; commas run several.")] = str(DOCUMENT_BUDGET),
    length: Annotated[str, typer.Option(help="Make prompts of this many tokens; commas run several.")] = "2048",
    batch: Annotated[str, typer.Option(help="Decode this many sequences at a time; commas run several.")] = "1",
    steps: Annotated[int, typer.Option(min=1, help="Time this many decode steps, and take the median.")] = 32,
    prefill_chunk_size: options.ChunkSize = None,
    prefill_repeats: Annotated[int, typer.Option(min=1, help="Prefill this often, and take the fastest.")] = 1,
    storage: Annotated[
        str, typer.Option(help="Store keys and values as the model computes them (model), or quantized: int8, int4.")
    ] = "model",
    baselines: Annotated[
        str,
        typer.Option(help="Measure these beside it: transformers (always), static (its StaticCache), kvpress."),
    ] = "transformers,static",
    also: Annotated[
        str | None, typer.Option(help="Show costs that benchmarks/kvpress_costs.py measured on this machine, too.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Measure a random model of this shape: llama-8b, llama2-7b, llama-1b, tiny.")
    ] = None,
    model: options.Model = "default",
    out: Annotated[str | None, typer.Option(help="Write costs.json, decode.png and memory.png to this folder.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Measure the time and memory of prefill and decode, beside the full cache and what the machine can do."""
    given = dict(locals())
    inputs.check_model("default" if shape else model)
    from kvkeep.cli import bench as measuring

    with show.busy("starting") as say:
        found, written = measuring.run(measuring.Options(**given), say)
    typer.echo(measuring.table(found))
    if written:
        typer.echo(written, err=True)


@app.command(epilog=EPILOG)
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="The table or figure to reproduce, such as intentkv/table1; see --list.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List every table and figure, and what it shows.")] = False,
    small: Annotated[bool, typer.Option("--small", help="Run less, on the default model, in minutes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and stop.")] = False,
    out: Annotated[
        str | None,
        typer.Option(help="Write rows and comparison.csv to this folder.", show_default="./reproduce/NAME"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Use this model, a name on the hub or a folder.", show_default="the paper's"),
    ] = None,
    data: options.Data = None,
    haystack: options.Haystack = None,
    squad: options.Squad = None,
    hotpotqa: options.HotpotQA = None,
    limit: options.Limit = None,
    schedule: options.Schedule = None,
    yarn: options.Yarn = None,
    ray: options.Ray = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Reproduce a table or figure of one of the five papers, and show its numbers beside ours."""
    given = {key: value for key, value in locals().items() if key not in ("name", "listing")}
    from kvkeep.cli import reproduce as recipes

    if listing or name is None:
        recipes.print_names()
    else:
        recipes.reproduce(name, recipes.Options(**given))


@app.command(epilog=EPILOG)
def methods(
    names: Annotated[
        list[str] | None, typer.Argument(help="List these alone, such as snapkv or +adakv.", show_default="all")
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
