"""The commands: `run`, `inspect`, `chat`, `serve`, `eval`, `report`, `bench`, `reproduce`, `methods`, `models`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import kvkeep
from kvkeep.cli import eval as evaluation
from kvkeep.cli import inputs, show
from kvkeep.errors import KvkeepError

TRAITS = """\
query-aware   yes: what is evicted depends on the newest queries, so on the
              question at the end: another question needs another prefill.
              retrieves: nothing is evicted, every query retrieves.
any length    takes prompts beyond the model's context length; others refuse
offloads      what is not attended to lies in host memory or on disk
can be saved  Cache.save writes what was kept to a file
Modifiers change none of this, but for +recall (retrieves, offloads) and
+cake, +entropy (query-aware)."""
INSPECTED = "kvkeep", "snapkv", "kvkeep_context"
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


Limit = Annotated[
    int | None,
    typer.Option(min=1, help="Samples per task and length; else all, 100 of RULER (officially 500), 10 of needles."),
]


def main() -> None:
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvkeep {kvkeep.__version__}")
        raise typer.Exit


@app.callback()
def _kvkeep(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """KV-cache compression for long contexts: evict, quantize, or offload and retrieve keys and values."""


@app.command(epilog=EPILOG)
def run(
    document: Annotated[str, typer.Argument(help="A text file, or - for standard input.")],
    question: Annotated[str, typer.Argument(help="What to ask about it.")],
    method: Annotated[
        str | None, typer.Option(help="See `kvkeep methods`; modifiers follow it: snapkv+adakv. Else kvkeep_lookahead.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Tokens kept per key head, a fraction of the prompt (0.1), or auto; several by commas.")
    ] = "512",
    model: Annotated[str, typer.Option(help="`default`, a hub id, or a local folder.")] = "default",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop the answer after this many tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling; 0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: from all.")] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A method's parameter, name=value.")] = None,
    prefill_chunk_size: Annotated[int | None, typer.Option(min=2, help="Prefill this many tokens at a time.")] = None,
    storage: Annotated[str | None, typer.Option(help="int8 or int4: quantize keys and values.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Run `full` beside it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling, and of methods with random parts.")] = 0,
) -> None:
    """Answer a question about a document from a compressed cache, and report its memory and speed."""
    text, question = inputs.prompt(document, question)
    plans = inputs.plans(method, budget, settings or [], storage)
    if compare and all((plan.method, plan.storage) != ("full", None) for plan in plans):
        plans += inputs.plans("full", budget, [])[:1]
    from kvkeep.cli.run import QuestionRunner, check_lengths
    from kvkeep.engine.sampling import Generation
    from kvkeep.model.load import check_device

    how = Generation(max_new_tokens, temperature, top_p, top_k, seed)
    with show.busy("starting") as say:
        check_device(device, dtype)
        check_lengths(model, plans, text, question, max_new_tokens, say)
        runner = QuestionRunner.load(model, device, dtype, say)
        engines = [runner.engine(plan, prefill_chunk_size) for plan in plans]
        runner.warm_up(seed)
    outcomes = [
        runner.ask(engine, plan, text, question, asdict(how), None if as_json or number else sys.stdout)
        for number, (engine, plan) in enumerate(zip(engines, plans, strict=True))
    ]
    if as_json:
        show.print_json(show.outcomes_as_dict(model, outcomes))
    else:
        show.print_outcomes(outcomes)


@app.command(epilog=EPILOG)
def inspect(
    document: Annotated[str, typer.Argument(help="A text file, or - for standard input.")],
    question: Annotated[str, typer.Argument(help="What to ask about it.")],
    methods: Annotated[str, typer.Option(help="Methods by commas; `full` is always among them.")] = ",".join(INSPECTED),
    budget: Annotated[
        str, typer.Option(help="Tokens kept per key head, a fraction of the prompt (0.1), or auto.")
    ] = "256",
    out: Annotated[str, typer.Option("--out", "-o", help="The page, one HTML file.")] = "inspect.html",
    protocol: Annotated[
        str, typer.Option(help="aware: the question is known before anything is evicted; agnostic: it is not.")
    ] = "aware",
    model: Annotated[str, typer.Option(help="`default`, a hub id, or a local folder.")] = "default",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop an answer after this many tokens.")] = 64,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
) -> None:
    """See which words of a document several methods keep: a page that needs no network."""
    text, question = inputs.prompt(document, question)
    names = list(dict.fromkeys(name.strip() for name in methods.split(",")))
    plans = [plan for name in names for plan in inputs.plans(name, budget.split(",")[0], [])]
    from kvkeep.cli import inspect_page
    from kvkeep.model.load import check_device
    from kvkeep.pages.inspector import check_protocol

    check_protocol(protocol)
    options = inspect_page.Options(model, protocol, max_new_tokens, device, dtype, out)
    with show.busy("starting") as say:
        check_device(device, dtype)
        written = inspect_page.run(text, question, plans, options, say)
    typer.echo(written)


@app.command(epilog=EPILOG)
def chat(
    model: Annotated[str, typer.Option(help="`default`, a hub id, or a local folder.")] = "default",
    method: Annotated[str | None, typer.Option(help="See `kvkeep methods`; else kvkeep_lookahead.")] = None,
    budget: Annotated[str, typer.Option(help="Tokens kept per key head, or a fraction of the prompt: 0.1.")] = "2048",
    settings: Annotated[list[str] | None, typer.Option("--set", help="A method's parameter, name=value.")] = None,
    storage: Annotated[str | None, typer.Option(help="int8 or int4: quantize keys and values.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop an answer after this many tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling; 0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
) -> None:
    """Chat with a model in the terminal, and see what its cache holds. /new begins again, /quit ends."""
    plan = inputs.plans(method, budget, settings or [], storage)[0]
    from kvkeep.cli import terminal_chat
    from kvkeep.cli.run import load_engine

    with show.busy("starting") as say:
        engine = load_engine(model, device, dtype, plan, say, method=method, prefix_cache=terminal_chat.PREFIX_BYTES)
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    with engine:
        terminal_chat.run(engine, system, options)


@app.command(epilog=EPILOG)
def serve(
    model: Annotated[
        str, typer.Option(envvar="KVKEEP_MODEL", help="`default`, a hub id, or a local folder.")
    ] = "default",
    method: Annotated[
        str | None, typer.Option(help="See `kvkeep methods`; a request may name another. Else kvkeep_lookahead.")
    ] = None,
    budget: Annotated[str, typer.Option(help="Tokens kept per key head, or a fraction of the prompt: 0.1.")] = "2048",
    settings: Annotated[list[str] | None, typer.Option("--set", help="A method's parameter, name=value.")] = None,
    storage: Annotated[str | None, typer.Option(help="int8 or int4: quantize keys and values.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; else as --model.")] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines in; they need keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    keys: Annotated[
        str | None, typer.Option(help="A file of API keys, one on every line; or KVKEEP_API_KEYS, by commas.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Other machines need no key.")] = False,
    memory: Annotated[str | None, typer.Option(help="Of all caches: 40GB; else 80 % of what is free.")] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Answers decoded at a time.")] = 64,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that wait; more are refused.")] = 1024,
    prefix_cache: Annotated[str, typer.Option(help="Of compressed prefixes that requests share; 0: none.")] = "1GB",
    prefix_folder: Annotated[str | None, typer.Option(help="Where they survive a restart.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 4096,
    max_body: Annotated[str, typer.Option(help="Of a request.")] = "4MB",
    max_seconds: Annotated[float, typer.Option(min=0.1, help="Until an answer is complete.")] = 600.0,
    max_answers: Annotated[int, typer.Option(min=1, help="Under way for one key.")] = 64,
    max_contexts: Annotated[int, typer.Option(min=0, help="Texts of POST /v1/contexts, for one key.")] = 64,
    max_context_bytes: Annotated[
        str | None, typer.Option(help="Of these; else half of --prefix-cache, where there are several keys.")
    ] = None,
    allow_parameters: Annotated[
        bool, typer.Option("--allow-parameters", help="Clients may give methods' parameters; some take hours.")
    ] = False,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Open at a time; more close the oldest that waits for its client.")
    ] = 1024,
    header_seconds: Annotated[float, typer.Option(min=0.1, help="Until a request's header is complete.")] = 10.0,
    body_seconds: Annotated[float, typer.Option(min=0.1, help="Until its body is.")] = 60.0,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="A line for every request, without prompts.")
    ] = True,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Pages of this origin may ask from a browser; several times for several.")
    ] = None,
    drain_seconds: Annotated[float, typer.Option(min=0, help="For answers under way, after SIGTERM.")] = 60.0,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Split the model over so many processes, with a GPU each; sizes are of each.")
    ] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="[ADDRESS]", help="Replicas on Ray: of this address, or this machine.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="With --ray: so many engines, each with all these limits.")] = 1,
    autoscale: Annotated[
        list[str] | None, typer.Option(help="With --ray: of Ray Serve, name=value: max_replicas=8.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
) -> None:
    """Serve a model by OpenAI's HTTP API, its caches compressed."""
    given = dict(locals())
    from kvkeep.cli import serve as serving

    how = given.pop("budget"), given.pop("settings") or [], given.pop("storage")
    plan = inputs.plans(method, *how)[0]
    with show.busy("starting") as say:
        lists = {name: tuple(given[name] or ()) for name in ("autoscale", "cors_origin")}
        serving.run(serving.Options(**given | lists), plan, say.note)


@app.command("eval", epilog=EPILOG)
def evaluate(
    tasks: Annotated[
        str | None, typer.Option(help="ruler, niah, needle, short, longbench/qasper, …, by commas.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder for rows.jsonl, times.jsonl and results.csv.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods by commas: snapkv,intentkv+adakv; else full,kvkeep.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Tokens kept per key head, fractions, or auto, by commas: 128,0.1; else 512.")
    ] = None,
    protocol: Annotated[str | None, typer.Option(help="agnostic or aware; else both.")] = None,
    model: Annotated[str | None, typer.Option(help="`default`, a hub id, or a local folder.")] = None,
    length: Annotated[str | None, typer.Option(help="Tokens of generated tasks, by commas; else 4096.")] = None,
    limit: Limit = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of generated tasks; else 42.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder of official files: longbench/qasper.jsonl …")] = None,
    haystack: Annotated[str | None, typer.Option(help="Essays for needle tasks: a folder of .txt files.")] = None,
    squad: Annotated[str | None, typer.Option(help="SQuAD's dev file, for RULER's qa_1.")] = None,
    hotpotqa: Annotated[str | None, typer.Option(help="HotpotQA's dev file, for RULER's qa_2.")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Truncate prompts to this many tokens; else to the context length.")
    ] = None,
    beyond_window: Annotated[
        bool | None,
        typer.Option("--beyond-window", help="No truncation for methods that extend the context length."),
    ] = None,
    share: Annotated[
        bool | None,
        typer.Option("--share/--alone", help="Share one prefill and one decode batch, or run every config by itself."),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="[ADDRESS]", help="On Ray: a cluster at this address, or this machine.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with any of these names.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
) -> None:
    """Score methods on tasks; a run that was stopped resumes."""
    given = {name: value for name, value in locals().items() if name != "config"}
    options = evaluation.eval_options(config, given)
    with show.counting("starting") as (say, note):
        rows, skipped = evaluation.run(options, say, note)
    show.print_scores(rows)
    for remark in show.remarks(rows):
        typer.echo(f"note: {remark}", err=True)
    for name, why in skipped.items():
        typer.echo(f"left out: {name} {why}", err=True)
    typer.echo(f"{len(rows)} rows in {options.out}: rows.jsonl, times.jsonl, results.csv")


@app.command(epilog=EPILOG)
def report(folder: Annotated[str, typer.Argument(help="Of rows that `kvkeep eval --out` wrote.")]) -> None:
    """Show the scores of an evaluation: one page with tables, curves and maps; pictures and CSV files beside it."""
    from kvkeep.cli import report_page

    written, missing = report_page.run(folder)
    if missing:
        typer.echo(missing, err=True)
    typer.echo(written)


@app.command(epilog=EPILOG)
def bench(
    methods: Annotated[str, typer.Option(help="Methods by commas.")] = "kvkeep",
    budget: Annotated[str, typer.Option(help="Tokens kept per key head, or fractions, by commas: 128,0.1.")] = "512",
    length: Annotated[str, typer.Option(help="Tokens of the prompt, by commas.")] = "2048",
    batch: Annotated[str, typer.Option(help="Sequences decoded at a time, by commas.")] = "1",
    steps: Annotated[int, typer.Option(min=1, help="Decode steps; the median counts.")] = 32,
    prefill_chunk_size: Annotated[int | None, typer.Option(min=1, help="Prefill this many tokens at a time.")] = None,
    prefill_repeats: Annotated[int, typer.Option(min=1, help="Prefills; the fastest counts.")] = 1,
    storage: Annotated[str, typer.Option(help="Of keys and values, by commas: model, int8, int4.")] = "model",
    baselines: Annotated[
        str, typer.Option(help="transformers (always), static (its StaticCache, in a CUDA graph on a GPU), kvpress.")
    ] = "transformers,static",
    also: Annotated[
        str | None, typer.Option(help="Costs measured elsewhere on this machine: benchmarks/kvpress_costs.py's file.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="A random model of this shape: llama-8b, llama2-7b, llama-1b, tiny.")
    ] = None,
    model: Annotated[str, typer.Option(help="`default`, a hub id, or a local folder.")] = "default",
    out: Annotated[str | None, typer.Option(help="Folder for costs.json, decode.png and memory.png.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
) -> None:
    """Measure prefill, decode and memory, beside the uncompressed model and the roofline of this machine."""
    given = dict(locals())
    from kvkeep.cli import bench as measuring

    with show.busy("starting") as say:
        found, written = measuring.run(measuring.Options(**given), say)
    typer.echo(measuring.table(found))
    if written:
        typer.echo(written, err=True)


@app.command(epilog=EPILOG)
def reproduce(
    name: Annotated[str | None, typer.Argument(help="A table or figure: intentkv/table1 …; see --list.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Every table and figure, and what it shows.")] = False,
    small: Annotated[bool, typer.Option("--small", help="On the default model, in minutes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and stop.")] = False,
    out: Annotated[str | None, typer.Option(help="Folder for rows and comparison.csv; ./reproduce/NAME.")] = None,
    model: Annotated[str | None, typer.Option(help="In place of the paper's: a hub id or a local folder.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder of official files: longbench/qasper.jsonl …")] = None,
    haystack: Annotated[str | None, typer.Option(help="Essays for needle tasks: a folder of .txt files.")] = None,
    squad: Annotated[str | None, typer.Option(help="SQuAD's dev file, for RULER's qa_1.")] = None,
    hotpotqa: Annotated[str | None, typer.Option(help="HotpotQA's dev file, for RULER's qa_2.")] = None,
    limit: Limit = None,
    ray: Annotated[
        str | None, typer.Option(metavar="[ADDRESS]", help="On Ray: a cluster at this address, or this machine.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
) -> None:
    """Reproduce a table or figure of one of the five papers, its numbers beside ours."""
    given = {key: value for key, value in locals().items() if key not in ("name", "listing")}
    from kvkeep.cli import reproduce as recipes

    if listing or name is None:
        recipes.print_names()
    else:
        recipes.reproduce(name, recipes.Options(**given))


@app.command(epilog=EPILOG)
def methods(
    names: Annotated[list[str] | None, typer.Argument(help="These alone: snapkv, +adakv …; all, if none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")] = False,
) -> None:
    """List the methods: paper, what each keeps, parameters, when it evicts, where we deviate, what it can do."""
    from kvkeep.compress.presets import MODIFIERS

    for name in names or []:
        known = MODIFIERS if name.startswith("+") else kvkeep.methods
        known[name.removeprefix("+")]  # raises for one that is not there
    evicts = {None: "after prefill", 1: "every step"}
    rows = [
        {
            "name": name,
            "paper": each.paper,
            "keeps": each.keeps,
            "parameters": dict(each.parameters),
            "evicts": evicts.get(each.schedule.every) if each.scorer and not each.retrieval else None,
            "deviates": each.deviates,
            "query_aware": each.query_aware,
            "retrieves": each.retrieval is not None,
            "any_length": each.extends_context,
            "offloads": each.retrieval is not None,
            "can_be_saved": each.retrieval is None,
        }
        for name, each in kvkeep.methods.items()
        if not names or name in names
    ]
    if as_json:
        show.print_json(rows)
        return
    modifiers = [
        {"name": f"+{name}", "paper": c.paper, "keeps": c.keeps, "parameters": c.defaults, "deviates": c.deviates}
        for name, c in MODIFIERS.items()
        if not names or f"+{name}" in names
    ]
    show.print_table(["method", "keeps", "parameters"], [_cells(row) for row in rows + modifiers])
    if rows:
        header = ["method", "query-aware", "any length", "offloads", "can be saved"]
        show.print_table(header, [_traits(row) for row in rows])
        typer.echo(TRAITS)


def _cells(row: dict[str, Any]) -> list[str]:
    """One method in three columns that fit a narrow terminal."""
    keeps = f"{row['keeps']} (evicts {row['evicts']})" if row.get("evicts") else row["keeps"]
    if row["deviates"]:
        keeps += f"\nDeviates: {row['deviates']}."
    parameters = "\n".join(f"{key}={value}" for key, value in row["parameters"].items())
    return [f"{row['name']}\n{row['paper']}".rstrip(), keeps, parameters or "–"]


def _traits(row: dict[str, Any]) -> list[str]:
    """What one method can do, one word per column."""
    keys = "query_aware", "any_length", "offloads", "can_be_saved"
    aware, *others = ("yes" if row[key] else "no" for key in keys)
    return [row["name"], "retrieves" if row["retrieves"] else aware, *others]


@app.command(epilog=EPILOG)
def models(as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")] = False) -> None:
    """List the models kvkeep downloads by itself; --model also takes any hub id or local folder."""
    from kvkeep.model.load import known_models

    known = known_models()
    if as_json:
        show.print_json([{**asdict(each), "on_disk": each.on_disk} for each in known])
        return
    show.print_table(
        ["model", "parameters", "context length", "license", "source", "on disk"],
        [
            [m.name, m.parameters, f"{m.context_length:,}", m.license, m.source, "yes" if m.on_disk else "no"]
            for m in known
        ],
    )
