"""Conversations held through the public API, as users hold them: earlier answers are the model's own, right or wrong.

The protocol of such a row names the call and where the history is kept: `submit-host`, `chat-none`, `http-host`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from typing import Any

from kvkeep.compress.method import Method
from kvkeep.engine.engine import Engine
from kvkeep.engine.progress import now
from kvkeep.errors import BadInput
from kvkeep.evaluate.item import Item, TimedRow, budget_unit, row_key, setting
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.prefill import Config
from kvkeep.evaluate.sample import Messages, Turn

VIAS = "submit", "chat", "http"  # methods of Engine, and its server
HISTORIES = "host", "none"
PREFIX_BYTES = 1_000_000_000  # without a history, of what was said before: as in `kvkeep chat` and `kvkeep serve`
SERVED = "evaluated"  # the model's name over HTTP


@dataclass(frozen=True)
class Reply:
    """An answer, and what the cache held for it."""

    text: str
    new_tokens: int
    prompt_tokens: int
    kept_per_head: float
    bytes: int
    full_bytes: int

    @classmethod
    def of_prompt(cls, text: str, new_tokens: int, prompt_tokens: int, kept: float, size: int) -> Reply:
        """Make a reply from what is kept of the prompt. kept: tokens per KV head; size: their bytes"""
        full = round(size / max(1.0, kept) * prompt_tokens)
        return cls(text.strip(), new_tokens, prompt_tokens, kept, size, full)


Ask = Callable[[Messages, int], Reply]  # messages, and the most tokens of the answer


def converse(
    model: Any, tokenizer: Any, item: Item, methods: Mapping[Config, Method], own_schedule: bool
) -> Iterator[TimedRow]:
    """Hold the conversations with every config, each in an engine of its own, so that nothing is left of others."""
    via, _, kept = item.protocol.partition("-")
    history = None if kept == "none" else kept
    for config, method in methods.items():
        schedule = None if own_schedule or method.retrieval else "prompt"
        options: dict[str, Any] = {"schedule": schedule, "history": history, "prefix_cache": PREFIX_BYTES}
        with Engine(model, tokenizer, *config, **options) as engine:
            about = setting(model, tokenizer, item.samples[0], method)
            about |= {"budget_unit": budget_unit(config, method, engine.cache.budget)}
            about |= {"template": "chat" if tokenizer.chat_template else "plain"}
            for turn, reply, seconds in _turns(engine, item, via):
                key = row_key(item, turn, config)
                yield {**key, **_facts(turn, reply), **about}, {**key, "answer_s": seconds}


def _turns(engine: Engine, item: Item, via: str) -> Iterator[tuple[Turn, Reply, float]]:
    """Ask the questions in their order. -> each with its answer, and the seconds that took"""
    said: dict[int, Messages] = {}
    with _asking(engine, via) as ask:
        for turn in item.samples:
            assert isinstance(turn, Turn)
            messages = turn.messages(said.get(turn.talk, []))
            began = now(engine.model.device)
            reply = ask(messages, turn.max_new_tokens)
            said[turn.talk] = [*messages, {"role": "assistant", "content": reply.text}]
            yield turn, reply, now(engine.model.device) - began


@contextmanager
def _asking(engine: Engine, via: str) -> Iterator[Ask]:
    """Give the call that answers; over HTTP, a server runs meanwhile."""
    if via != "http":
        yield partial({"submit": submit, "chat": chat}[via], engine)
        return
    from kvkeep.serve.thread import served

    with served(engine, SERVED) as address:
        yield partial(http, address)


def submit(engine: Engine, messages: Messages, most: int) -> Reply:
    """Answer as the server does. Kept tokens and bytes are those of the prompt."""
    handle = engine.submit(messages, max_new_tokens=most)
    text, request = handle.result(), handle.request
    return Reply.of_prompt(text, len(request.answer.ids), len(request.ids), request.kept_tokens, request.kept_bytes)


def http(address: tuple[str, int], messages: Messages, most: int) -> Reply:
    """Answer as a client of the server is answered. Kept tokens and bytes are those of the prompt."""
    asked = {"model": SERVED, "messages": messages, "max_tokens": most, "temperature": 0}
    with closing(HTTPConnection(*address)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), headers)
        response = connection.getresponse()
        answer = json.load(response)
    if response.status != 200:
        raise BadInput(f"the server refuses a turn with status {response.status}: {answer['error']['message']}")
    text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    kept = usage["kvkeep"]
    return Reply.of_prompt(
        text, usage["completion_tokens"], usage["prompt_tokens"], kept["kept_tokens"], kept["kept_bytes"]
    )


def chat(engine: Engine, messages: Messages, most: int) -> Reply:
    """Kept tokens and bytes are those of prompt and answer."""
    text, report = engine.chat(messages, max_new_tokens=most, progress=False), engine.cache.report()
    answer = engine.answer
    return Reply(text, len(answer.ids), answer.prompt_tokens, report.kept_per_head, report.bytes, report.full_bytes)


def _facts(turn: Turn, reply: Reply) -> dict[str, Any]:
    """What a row says of this turn alone."""
    return {
        "turn": turn.turn,
        "talk": turn.talk,
        "score": METRICS[turn.metric](reply.text, list(turn.references), **turn.extra),
        "metric": turn.metric,
        "answer": reply.text,
        "new_tokens": reply.new_tokens,
        "cut": reply.new_tokens == turn.max_new_tokens,
        "kept_per_head": reply.kept_per_head,
        "bytes": reply.bytes,
        "full_bytes": reply.full_bytes,
        "prompt_tokens": reply.prompt_tokens,
        "truncated": 0,
    }
