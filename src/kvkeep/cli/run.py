"""`kvkeep run`, one question about one document, timed; `kvkeep chat`, a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal, TextIO

import torch
import typer

import kvkeep
from kvkeep.cache.report import format_bytes
from kvkeep.cli.inputs import Plan
from kvkeep.cli.options import ChatOptions, RunOptions, ServeOptions
from kvkeep.cli.show import Outcome, Say, busy, verified
from kvkeep.compress.defaults import PROMPT_METHODS
from kvkeep.compress.parse import parse_budget
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Agreement, Request
from kvkeep.engine.sampling import Generation
from kvkeep.engine.sequence import check_length
from kvkeep.errors import KvkeepError
from kvkeep.model.chat import encode, with_question
from kvkeep.model.hf_cache import context_length
from kvkeep.model.load import check_device, load, load_context_length, load_tokenizer, quiet_transformers
from kvkeep.terminal import AnswerTimer

GENERATION = "max_new_tokens", "temperature", "top_p", "top_k", "seed", "exact"  # options of `kvkeep run`
REPORTED = "kept_per_head", "kept", "bytes", "full_bytes", "index_bytes", "host_bytes", "coverage"  # of a Report
PREFIX_BYTES = 1_000_000_000  # of what was said before in a chat, which is not prefilled again
WARM_UP = 2000  # characters of a document: some hundred tokens


def answers(given: RunOptions, plans: list[Plan], document: str, question: str) -> list[Outcome]:
    """Ask every plan's method. The first one prints its answer while it is decoded, unless JSON is wanted."""
    generation = {name: getattr(given, name) for name in GENERATION}
    Generation(**generation)  # a wrong value is refused before anything is loaded
    with busy("starting") as say:
        check_device(given.device, given.dtype)
        check_lengths(given, plans, document, question, say)
        model, tokenizer = load(given.model, device=given.device, dtype=given.dtype, progress=say)
        engines = [
            kvkeep.Engine(
                model, tokenizer, plan.method, plan.budget, prefill_chunk_size=given.prefill_chunk_size, **plan.options
            )
            for plan in plans
        ]
        warm_up(model, engines, document, say)
        torch.manual_seed(given.seed)
    outs = [None if given.as_json else sys.stdout, *[None] * len(plans)]
    return [
        ask(engine, plan, document, question, generation, out)
        for engine, plan, out in zip(engines, plans, outs, strict=False)
    ]


def check_lengths(given: RunOptions, plans: list[Plan], document: str, question: str, say: Say) -> None:
    """Refuse a prompt that is too long for a method before the weights are loaded, by tokenizer and config alone."""
    quiet_transformers()
    tokens = encode(load_tokenizer(given.model, say), with_question(document, question)).shape[1]
    for plan in plans:
        method, _ = parse_budget(plan.method or PROMPT_METHODS[0], plan.budget, **plan.parameters)
        check_length(method, load_context_length(given.model), tokens, given.max_new_tokens)


def load_engine(
    given: ChatOptions | ServeOptions,
    plan: Plan,
    say: Callable[[str], None],
    tp_plan: Literal["auto"] | None = None,
    **options: Any,
) -> kvkeep.Engine:
    """Load an engine that is ready to answer. tp_plan: of `kvkeep.load`; options: of `Engine`"""
    quiet_transformers()
    model, tokenizer = load(given.model, device=given.device, dtype=given.dtype, progress=say, tp_plan=tp_plan)
    engine = kvkeep.Engine(model, tokenizer, plan.method, plan.budget, **plan.options, **options)
    engine.warmup(progress=say)
    return engine


def warm_up(model: Any, engines: list[Engine], document: str, say: Say) -> None:
    """Run once what is slower the first time. Methods that are compared all answer the document's beginning."""
    with torch.inference_mode():
        model(torch.zeros((1, 8), dtype=torch.long, device=model.device))
    if len(engines) > 1:
        say("warming up")
        for engine in engines:
            engine.generate(document[:WARM_UP], max_new_tokens=2, progress=False)


def ask(
    engine: Engine, plan: Plan, document: str, question: str, generation: dict[str, Any], out: TextIO | None
) -> Outcome:
    """out: where the answer is printed while it is decoded"""
    timer = AnswerTimer()
    name = plan.method or engine.method.name
    with busy("starting") as say:
        say(f"{name}: prefill")
        texts = engine.stream(
            document,
            question=question,
            progress=lambda progress: say.often(f"{name}: {progress}"),
            **generation,
        )
        for number, text in enumerate(timer.watch(texts)):
            if number == 0:
                say.stop()
            if out:
                print(text, end="", file=out, flush=True)
    if out:
        print(file=out, flush=True)
    report = engine.cache.report().as_dict()
    return Outcome(
        method=name,
        budget=plan.budget,
        answer=engine.answer.text.strip(),
        prompt_tokens=engine.answer.prompt_tokens,
        context_length=context_length(engine.model),
        new_tokens=len(engine.answer.ids),
        **{key: report[key] for key in REPORTED},
        exact=Agreement.total([engine.agreement]) if generation["exact"] else None,
        first_token_s=timer.first_token_s,
        tokens_per_s=timer.rate(len(engine.answer.ids)),
    )


def chat(engine: Engine, given: ChatOptions) -> None:
    """`kvkeep chat`: a conversation until /quit or the end of the input; after every answer, what the cache holds."""
    options = {"max_new_tokens": given.max_new_tokens, "temperature": given.temperature}
    options |= {"seed": given.seed, "exact": given.exact}
    first = [{"role": "system", "content": given.system}] if given.system else []
    messages = list(first)
    while (line := _line()) is not None:
        if line == "/quit":
            return
        if line == "/new":
            messages = list(first)
        elif line.startswith("/") and " " not in line:
            typer.echo(f"{line} is no command; there are /new and /quit.", err=True)
        elif line:
            messages = _turn(engine, [*messages, {"role": "user", "content": line}], options)


def _line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _turn(engine: Engine, messages: list[dict[str, str]], options: dict[str, Any]) -> list[dict[str, str]]:
    """The conversation with the answer; without the last message, if there is none."""
    try:
        handle = engine.submit(messages, **options)
        _print(handle)
    except KvkeepError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        return messages[:-1]
    typer.echo(held(handle.request), err=True)
    return [*messages, {"role": "assistant", "content": handle.text.strip()}]


def _print(answer: Any) -> None:
    """Print the answer while it is decoded; Ctrl+C ends it."""
    try:
        for text in answer:
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        answer.cancel()
    print(flush=True)


def held(request: Request) -> str:
    """What the cache holds of the conversation so far, and what of it was reused: not prefilled again."""
    tokens, size = len(request.ids), format_bytes(request.kept_bytes)
    full = format_bytes(request.kept_bytes / max(1.0, request.kept_tokens) * tokens)
    kept = f"{request.kept_tokens:,.0f} of {tokens:,} tokens kept per KV head, {size} of {full}"
    reused = f"{request.num_cached:,} reused from earlier turns, {tokens - request.num_cached:,} prefilled"
    exact = f"; verified {verified(Agreement.total([request.agreement]))}" if request.how.exact else ""
    return f"[{kept}; {reused}, {len(request.answer.ids)} generated{exact}]"
