"""`kvkeep chat`: a conversation in the terminal; after every answer, what the cache holds."""

from __future__ import annotations

import sys
from typing import Any

import typer

from kvkeep.cache.report import format_bytes
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request
from kvkeep.errors import KvkeepError

PREFIX_BYTES = 1_000_000_000  # of what was said before, which is not prefilled again
Message = dict[str, str]


def run(engine: Engine, system: str | None, options: dict[str, Any]) -> None:
    """Until /quit, or the end of the input."""
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


def _turn(engine: Engine, messages: list[Message], options: dict[str, Any]) -> list[Message]:
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
    """As it is decoded; Ctrl+C ends it."""
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
    kept = f"{request.kept_tokens:,.0f} of {tokens:,} tokens kept per key head, {size} of {full}"
    reused = f"{request.num_cached:,} reused from earlier turns, {tokens - request.num_cached:,} prefilled"
    return f"[{kept}; {reused}, {len(request.answer.ids)} generated]"
