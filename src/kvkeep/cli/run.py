"""`kvkeep run`, one question about one document, timed; `kvkeep chat`, a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import typer

import kvkeep
from kvkeep.cache.report import format_bytes
from kvkeep.cli.inputs import Plan
from kvkeep.cli.show import Outcome, busy
from kvkeep.compress.defaults import PROMPT_METHODS
from kvkeep.compress.parse import parse_budget
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request
from kvkeep.engine.sequence import check_length
from kvkeep.errors import KvkeepError
from kvkeep.model.chat import encode, with_question
from kvkeep.model.hf_cache import context_length
from kvkeep.model.load import load, load_context_length, load_tokenizer, quiet_transformers

REPORTED = "kept_per_head", "kept", "bytes", "full_bytes", "index_bytes", "host_bytes", "coverage"  # of a Report
PREFIX_BYTES = 1_000_000_000  # of what was said before in a chat, which is not prefilled again
WARM_UP = 2000  # characters of a document: some hundred tokens


def check_lengths(
    name: str, plans: list[Plan], document: str, question: str, max_new_tokens: int, say: Callable[[str], None]
) -> None:
    """Refuse a prompt that is too long for a method before the weights are loaded, by tokenizer and config alone."""
    quiet_transformers()
    tokens = encode(load_tokenizer(name, say), with_question(document, question)).shape[1]
    for plan in plans:
        method, _ = parse_budget(plan.method or PROMPT_METHODS[0], plan.budget, **plan.parameters)
        check_length(method, load_context_length(name), tokens, max_new_tokens)


def load_engine(
    name: str,
    device: str | None,
    dtype: str | None,
    plan: Plan,
    say: Callable[[str], None],
    tp_plan: Literal["auto"] | None = None,
    **options: Any,
) -> kvkeep.Engine:
    """Load an engine that is ready to answer. tp_plan: of `kvkeep.load`; options: of `Engine`"""
    quiet_transformers()
    model, tokenizer = load(name, device=device, dtype=dtype, progress=say, tp_plan=tp_plan)
    options = {"method": plan.method, "storage": plan.storage, **plan.parameters, **options}
    engine = kvkeep.Engine(model, tokenizer, budget=plan.budget, **options)
    engine.warmup(progress=say)
    return engine


@dataclass(frozen=True)
class QuestionRunner:
    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, name: str, device: str | None, dtype: str | None, say: Callable[[str], None]) -> QuestionRunner:
        quiet_transformers()
        return cls(*load(name, device=device, dtype=dtype, progress=say))

    def warm_up(self, engines: list[Any], document: str, seed: int, say: Callable[[str], None]) -> None:
        """Run once what is slower the first time. Methods that are compared all answer the document's beginning."""
        with torch.inference_mode():
            self.model(torch.zeros((1, 8), dtype=torch.long, device=self.model.device))
        if len(engines) > 1:
            say("warming up")
            for engine in engines:
                engine.generate(document[:WARM_UP], max_new_tokens=2, progress=False)
        torch.manual_seed(seed)

    def engine(self, plan: Plan, prefill_chunk_size: int | None) -> Any:
        options = {"prefill_chunk_size": prefill_chunk_size, "storage": plan.storage, **plan.parameters}
        return kvkeep.Engine(self.model, self.tokenizer, plan.method, plan.budget, **options)

    def ask(self, engine: Any, plan: Plan, document: str, question: str, options: dict[str, Any], out: Any) -> Outcome:
        """options: of generation; out: where text is printed as it is decoded, or None"""
        timer, name = AnswerTimer(), plan.method or engine.method.name
        with busy("starting") as say:
            say(f"{name}: prefill")
            texts = engine.stream(
                document,
                question=question,
                progress=lambda progress: say.often(f"{name}: {progress}"),
                **options,
            )
            for text in texts:
                if not timer.count:
                    say.stop()
                timer.tick()
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
            context_length=context_length(self.model),
            new_tokens=len(engine.answer.ids),
            **{key: report[key] for key in REPORTED},
            first_token_s=timer.first - timer.started,
            tokens_per_s=timer.rate(len(engine.answer.ids)),
        )


class AnswerTimer:
    """Times of the first and the last text of an answer."""

    def __init__(self) -> None:
        self.started = self.first = self.last = time.perf_counter()
        self.count = 0

    def tick(self) -> None:
        self.last = time.perf_counter()
        self.first = self.first if self.count else self.last
        self.count += 1

    def rate(self, tokens: int) -> float | None:
        """Tokens per second after the first."""
        return (tokens - 1) / (self.last - self.first) if tokens > 1 and self.last > self.first else None


def chat(engine: Engine, system: str | None, options: dict[str, Any]) -> None:
    """`kvkeep chat`: a conversation until /quit or the end of the input; after every answer, what the cache holds."""
    first = [{"role": "system", "content": system}] if system else []
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
    return f"[{kept}; {reused}, {len(request.answer.ids)} generated]"
