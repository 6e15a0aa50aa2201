"""The arguments and options of the commands, with their help; first those that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from kvkeep.compress.defaults import BUDGET, CONTEXT_METHODS, DOCUMENT_BUDGET, PROMPT_METHODS

LOCAL = "local"  # an embedded Ray on this machine
TOKENS = "how many tokens of the prompt each KV head keeps (512), or which fraction of them (0.1)"
INSPECTED = PROMPT_METHODS[0], CONTEXT_METHODS[0], "snapkv"
METHODS = "full", PROMPT_METHODS[0], CONTEXT_METHODS[0]

Document = Annotated[str, Argument(help="The text file to read; - reads standard input.")]
Question = Annotated[str, Argument(help="The question to answer about the document.")]
Model = Annotated[
    str, Option(help="The model to load: `default`, a name on the hub, or a folder. `kvkeep models` suggests some.")
]
Method = Annotated[
    str | None,
    Option(
        help="The method that decides what to keep, with any modifiers: snapkv+adakv. `kvkeep methods` lists them.",
        show_default=PROMPT_METHODS[0],
    ),
]
Budget = Annotated[str, Option(help=f"Set {TOKENS}.")]
Settings = Annotated[
    list[str] | None, Option("--set", help="Set a parameter of the method, as name=value; repeat it for more.")
]
Storage = Annotated[str | None, Option(help="Quantize the keys and values that are kept: int8 or int4.")]
Device = Annotated[
    str | None, Option(help="The device to run on: cpu, cuda, cuda:1 …", show_default="a GPU where there is one")
]
Dtype = Annotated[
    str | None,
    Option(
        help="The type to compute in: float32, bfloat16, float16, or auto, as the model was saved.",
        show_default="float32 on a CPU, else auto",
    ),
]
Temperature = Annotated[float, Option(min=0, help="Sample at this temperature; 0 takes the likeliest token.")]
Seed = Annotated[int, Option(min=0, help="Seed the sampling, and methods with random parts.")]
ChunkSize = Annotated[int | None, Option(min=2, help="Prefill the prompt in chunks of this many tokens.")]
Exact = Annotated[bool, Option("--exact", help="Verify every token against the whole prompt; say what full says.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON in place of text.")]

Data = Annotated[
    str | None, Option(help="The folder that holds the benchmarks' official files: longbench/qasper.jsonl …")
]
Haystack = Annotated[str | None, Option(help="The folder of .txt essays that needle tasks hide needles in.")]
Squad = Annotated[str | None, Option(help="SQuAD's dev file, which RULER's qa_1 is made of.")]
HotpotQA = Annotated[str | None, Option(help="HotpotQA's dev file, which RULER's qa_2 is made of.")]
Limit = Annotated[
    int | None,
    Option(
        min=1,
        help="Take this many samples of each task and length.",
        show_default="all; 100 of RULER (officially 500), 10 of needles",
    ),
]
Ray = Annotated[
    str | None,
    Option(metavar="[ADDRESS]", help="Run on the Ray cluster at this address; without one, on this machine."),
]
Schedule = Annotated[
    str | None,
    Option(
        help="Evict once, after the prompt (prompt), or while decoding, too, as each method does (own).",
        show_default="prompt",
    ),
]
Yarn = Annotated[float | None, Option(min=1, help="Lengthen the model's context length by this factor, with YaRN.")]


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """A field of a dataclass that is an option of a command; names and more: of `typer.Option`."""
    return field(default=default, metadata={"option": Option(*names, help=help, **more)})


def takes(kind: type[Any]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Make a command of a function of one dataclass: every field of it is an option or an argument."""
    parameters = dict(signature(kind, eval_str=True).parameters)
    for each in fields(kind):
        if each.metadata:
            hint: Any = Annotated[parameters[each.name].annotation, each.metadata["option"]]
            parameters[each.name] = parameters[each.name].replace(annotation=hint)

    def command_of(run: Callable[[Any], None]) -> Callable[..., None]:
        @wraps(run)
        def command(**values: Any) -> None:
            run(kind(**values))

        command.__signature__ = Signature(list(parameters.values()))  # type: ignore[attr-defined]
        return command

    return command_of


@dataclass(frozen=True)
class RunOptions:
    """The options of `kvkeep run`."""

    document: Document
    question: Question
    method: Method = None
    budget: str = option(
        str(DOCUMENT_BUDGET), f"Set {TOKENS}; auto keeps what the scores call for. Commas run several."
    )
    model: Model = "default"
    max_new_tokens: int = option(64, "Stop the answer after this many tokens.", min=1)
    temperature: Temperature = 0.0
    top_p: float = option(1.0, "Sample from the likeliest tokens with this total probability.")
    top_k: int = option(0, "Sample from this many likeliest tokens; 0 takes all.", min=0)
    settings: Settings = None
    prefill_chunk_size: ChunkSize = None
    storage: Storage = None
    compare: bool = option(False, "Also answer with the full cache, and compare.", "--compare")
    exact: Exact = False
    as_json: AsJson = False
    device: Device = None
    dtype: Dtype = None
    seed: Seed = 0


@dataclass(frozen=True)
class InspectOptions:
    """The options of `kvkeep inspect`."""

    document: Document
    question: Question
    methods: str = option(",".join(INSPECTED), "The methods to compare, by commas; `full` is always among them.")
    budget: str = option(str(DOCUMENT_BUDGET), f"Set {TOKENS}; auto keeps what the scores call for.")
    out: str = option("inspect.html", "Write the page to this HTML file.", "--out", "-o")
    protocol: str = option(
        "aware", "Let methods know the question before they evict (aware), or after they did (agnostic)."
    )
    model: Model = "default"
    max_new_tokens: int = option(64, "Stop every answer after this many tokens.", min=1)
    device: Device = None
    dtype: Dtype = None


@dataclass(frozen=True)
class ChatOptions:
    """The options of `kvkeep chat`."""

    model: Model = "default"
    method: Method = None
    budget: Budget = str(BUDGET)
    settings: Settings = None
    storage: Storage = None
    system: str | None = option(None, "Tell the model this before the conversation.")
    max_new_tokens: int = option(512, "Stop every answer after this many tokens.", min=1)
    temperature: Temperature = 0.0
    seed: Seed = 0
    exact: Exact = False
    device: Device = None
    dtype: Dtype = None


@dataclass(frozen=True)
class PlanOptions:
    """The options of `kvkeep plan`."""

    model: Model = "default"
    context: int | None = option(None, "Tokens of a conversation.", min=1, show_default="the model's context length")
    chats: int = option(64, "How many conversations there are.", min=1)
    budget: Budget = str(BUDGET)
    dtype: str = option("bfloat16", "The type of keys and values: bfloat16, float16 or float32.")
    as_json: AsJson = False


@dataclass(frozen=True)
class ServeOptions:
    """The options of `kvkeep serve`; processes that follow the first one are sent them."""

    model: str = option(
        "default", "The model to serve: `default`, a name on the hub, or a folder.", envvar="KVKEEP_MODEL"
    )
    method: Method = None
    budget: Budget = str(BUDGET)
    settings: Settings = None
    storage: Storage = None
    name: str | None = option(None, "The name that clients call the model by.", show_default="as --model")
    host: str = option("127.0.0.1", "Listen on this address; 0.0.0.0 lets other machines in, which then need a key.")
    port: int = option(8000, "Listen on this port; 0 takes any that is free.", min=0, max=65535)
    keys: str | None = option(
        None, "Accept the API keys in this file, one on every line; or set KVKEEP_API_KEYS, by commas."
    )
    public: bool = option(False, "Let other machines in without a key.", "--public")
    memory: str | None = option(
        None, "All caches together take at most this much: 40GB.", show_default="80 % of what is free"
    )
    max_rows: int = option(64, "Decode at most this many answers at a time.", min=1)
    max_waiting: int = option(1024, "Let this many requests wait; more are refused with status 429.", min=1)
    target_itl: float | None = option(
        None,
        "While prompts are prefilled, give every answer a token after so many seconds; more prefills sooner.",
        min=0.001,
        show_default="0.08 on a GPU",
    )
    history: str = option(
        "host", "Keep the whole of conversations and texts in host memory, for the next turn: `host`, or `none`."
    )
    host_memory: str | None = option(
        None, "These take at most this much host memory: 64GB.", show_default="half of what is free"
    )
    history_storage: str | None = option(None, "Quantize these in host memory: int8 or int4.")
    prefix_cache: str = option(
        "1GB", "Without a history, keep this much of compressed prefixes instead; 0 also refuses POST /v1/contexts."
    )
    prefix_folder: str | None = option(
        None, "Save histories, prefixes and contexts to this folder, so that they survive a restart."
    )
    max_tokens: int = option(4096, "Allow answers of at most this many tokens.", min=1)
    max_body: str = option("4MB", "Refuse requests with larger bodies than this.")
    max_seconds: float = option(600.0, "End an answer that is not complete after this many seconds.", min=0.1)
    max_answers: int = option(64, "Let each key have this many answers under way.", min=1)
    max_contexts: int = option(64, "Let each key store this many texts by POST /v1/contexts.", min=0)
    max_context_bytes: str | None = option(
        None,
        "Let the texts of each key take this much.",
        show_default="half of --host-memory, where there are several keys",
    )
    allow_parameters: bool = option(
        False, "Let clients set parameters of methods; some values take hours.", "--allow-parameters"
    )
    allow_special_tokens: bool = option(
        False, "Read control tokens in clients' messages as such, not as text.", "--allow-special-tokens"
    )
    max_connections: int = option(
        1024, "Hold this many connections open; one more closes the oldest idle or half-open one.", min=1
    )
    header_seconds: float = option(10.0, "Close a connection whose request header takes longer than this.", min=0.1)
    body_seconds: float = option(60.0, "Close a connection whose request body takes longer than this.", min=0.1)
    access_log: bool = option(True, "Log a line for every request, without prompts.", "--access-log/--no-access-log")
    cors_origin: list[str] | None = option(None, "Let pages of this origin ask from a browser; repeat it for more.")
    drain_seconds: float = option(60.0, "After SIGTERM, give answers under way this many seconds to finish.", min=0)
    weights: str | None = option(
        None, "Run linear layers in 8-bit floats: fp8, or fp8+head with the LM head.", show_default="as loaded"
    )
    tensor_parallel: int = option(
        1, "Split the model over this many processes, each with a GPU; sizes are per process.", min=1
    )
    ray: Ray = None
    replicas: int = option(1, "With --ray, run this many engines, each with all of these limits.", min=1)
    autoscale: list[str] | None = option(None, "With --ray, set how Ray Serve scales, as name=value: max_replicas=8.")
    device: Device = None
    dtype: Dtype = None


@dataclass(frozen=True)
class EvalArguments:
    """The options of `kvkeep eval`, None where they are not given."""

    tasks: str | None = option(
        None, "The tasks to score, by commas: ruler, niah, needle, talk, short, longbench/qasper, …"
    )
    out: str | None = option(None, "Write rows.jsonl, times.jsonl and results.csv to this folder.")
    methods: str | None = option(None, "The methods to score, by commas.", show_default=",".join(METHODS))
    budget: str | None = option(None, f"Set {TOKENS}, or auto; commas run several.", show_default=str(DOCUMENT_BUDGET))
    protocol: str | None = option(
        None,
        "Let methods know the question before they evict (aware), or after they did (agnostic).",
        show_default="both",
    )
    via: str | None = option(
        None,
        "Hold conversations (talk/…) by `submit` or `chat`, or over `http`, with a server; commas try several.",
        show_default="submit",
    )
    history: str | None = option(
        None, "Keep their history in host memory (host), or keep none; commas try both.", show_default="host"
    )
    model: str | None = option(
        None, "The model to score: `default`, a name on the hub, or a folder.", show_default="default"
    )
    length: str | None = option(None, "Make prompts of this many tokens; commas run several.", show_default="4096")
    limit: Limit = None
    seed: int | None = option(None, "Seed the tasks that are made.", min=0, show_default="42")
    data: Data = None
    haystack: Haystack = None
    squad: Squad = None
    hotpotqa: HotpotQA = None
    max_length: int | None = option(
        None, "Truncate prompts to this many tokens.", min=1, show_default="the model's context length"
    )
    beyond_window: bool | None = option(
        None, "Truncate nothing for methods that extend the context length.", "--beyond-window"
    )
    schedule: Schedule = None
    yarn: Yarn = None
    share: bool | None = option(
        None, "Share one prefill and one decode batch, or run every config by itself.", "--share/--alone"
    )
    ray: Ray = None
    config: Path | None = option(None, "Read any of these options from this YAML file.")
    device: Device = None
    dtype: Dtype = None


@dataclass(frozen=True)
class BenchOptions:
    """The options of `kvkeep bench`: what is measured, on what."""

    methods: str = option(PROMPT_METHODS[0], "The methods to measure, by commas.")
    budget: str = option(str(DOCUMENT_BUDGET), f"Set {TOKENS}; commas run several.")
    length: str = option("2048", "Make prompts of this many tokens; commas run several.")
    batch: str = option("1", "Decode this many sequences at a time; commas run several.")
    steps: int = option(32, "Time this many decode steps, and take the median.", min=1)
    prefill_chunk_size: ChunkSize = None
    prefill_repeats: int = option(1, "Prefill this often, and take the fastest.", min=1)
    storage: str = option(
        "model", "Store keys and values as the model computes them (model), or quantized: int8, int4."
    )
    baselines: str = option(
        "transformers,static", "Measure these beside it: transformers (always), static (its StaticCache), kvpress."
    )
    also: str | None = option(None, "Show costs that benchmarks/kvpress_costs.py measured on this machine, too.")
    shape: str | None = option(None, "Measure a random model of this shape: llama-8b, llama2-7b, llama-1b, tiny.")
    model: Model = "default"
    out: str | None = option(None, "Write costs.json, decode.png and memory.png to this folder.")
    device: Device = None
    dtype: Dtype = None


@dataclass(frozen=True)
class ReproduceOptions:
    """The options of `kvkeep reproduce`."""

    name: Annotated[
        str | None, Argument(help="The table or figure to reproduce, such as intentkv/table1; see --list.")
    ] = None
    listing: bool = option(False, "List every table and figure, and what it shows.", "--list")
    small: bool = option(False, "Run less, on the default model, in minutes.", "--small")
    dry_run: bool = option(False, "Say what would be run, and stop.", "--dry-run")
    out: str | None = option(None, "Write rows and comparison.csv to this folder.", show_default="./reproduce/NAME")
    model: str | None = option(None, "Use this model, a name on the hub or a folder.", show_default="the paper's")
    data: Data = None
    haystack: Haystack = None
    squad: Squad = None
    hotpotqa: HotpotQA = None
    limit: Limit = None
    schedule: Schedule = None
    yarn: Yarn = None
    ray: Ray = None
    device: Device = None
    dtype: Dtype = None
