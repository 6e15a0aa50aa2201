"""One question to one model, with the clock running."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import kvkeep
from kvkeep.cli.inputs import Plan
from kvkeep.cli.show import Outcome, busy
from kvkeep.compress.parse import parse
from kvkeep.engine.engine import check_length
from kvkeep.engine.progress import Progress
from kvkeep.model.chat import as_asked, encode
from kvkeep.model.hf_cache import trained_window
from kvkeep.model.load import hush, load, load_tokenizer, load_window

SHOWN = "kept_per_head", "kept", "bytes", "full_bytes", "index_bytes", "host_bytes"  # of a report


def check_lengths(
    name: str, plans: list[Plan], document: str, question: str, max_new_tokens: int, say: Callable[[str], None]
) -> None:
    """Refuse a prompt that is too long for a method before the weights are loaded: tokenizer and window tell."""
    hush()
    tokens = encode(load_tokenizer(name, say), as_asked(document, question)).shape[1]
    for plan in plans:
        check_length(parse(plan.method, **plan.parameters), load_window(name), tokens, max_new_tokens)


@dataclass(frozen=True)
class Asker:
    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, name: str, device: str | None, dtype: str | None, say: Callable[[str], None]) -> Asker:
        hush()
        return cls(*load(name, device=device, dtype=dtype, progress=say))

    def warm_up(self, seed: int) -> None:
        """Pay for the first use of the weights before the clock runs."""
        torch.manual_seed(seed)
        with torch.inference_mode():
            self.model(torch.zeros((1, 8), dtype=torch.long, device=self.model.device))

    def engine(self, plan: Plan, chunk: int | None) -> Any:
        how = {"piece": chunk, "storage": plan.storage, **plan.parameters}
        return kvkeep.Engine(self.model, self.tokenizer, plan.method, plan.budget, **how)

    def ask(self, engine: Any, plan: Plan, document: str, question: str, options: dict[str, Any], out: Any) -> Outcome:
        """options: of the answer; out: where it is written as it comes, or None."""
        clock = Clock()
        with busy("starting") as say:
            say(f"{plan.method}: reading the document")
            pieces = engine.stream(
                document,
                question=question,
                progress=lambda progress: say.often(f"{plan.method}: {told(progress)}"),
                **options,
            )
            for piece in pieces:
                if not clock.written:
                    say.stop()
                clock.tick()
                if out:
                    print(piece, end="", file=out, flush=True)
        if out:
            print(file=out, flush=True)
        report = engine.cache.report().as_dict()
        return Outcome(
            method=plan.method,
            budget=plan.budget,
            answer=engine.answer.text.strip(),
            prompt_tokens=engine.answer.prompt_tokens,
            window=trained_window(self.model),
            new_tokens=len(engine.answer.ids),
            **{key: report[key] for key in SHOWN},
            **clock.speed(len(engine.answer.ids)),
        )


def told(progress: Progress) -> str:
    """How far, how fast, how long still."""
    text = f"read {progress.done:,} of {progress.total:,} tokens, {progress.rate:,.0f}/s"
    minutes, seconds = divmod(round(progress.left), 60)
    return text if progress.done == progress.total else f"{text}, {minutes}:{seconds:02} left"


class Clock:
    """When the first and the last piece of an answer came."""

    def __init__(self) -> None:
        self.started = self.first = self.last = time.perf_counter()
        self.written = 0

    def tick(self) -> None:
        self.last = time.perf_counter()
        self.first = self.first if self.written else self.last
        self.written += 1

    def speed(self, tokens: int) -> dict[str, float | None]:
        rate = (tokens - 1) / (self.last - self.first) if tokens > 1 and self.last > self.first else None
        return {"first_token_s": self.first - self.started, "tokens_per_s": rate}
