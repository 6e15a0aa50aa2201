"""Output: a spinner while waiting, tables, JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer

from kvkeep.terminal import Bar

ROWS_LOG_S = 60  # between lines of a log that count rows
PREFILL_LOG_S = 10  # between lines that tell the progress of prefill
FULL = "full"  # the method that keeps everything
NOISE = "All methods were warmed up before. Times are of one run: on a busy machine, differences are noise."


@dataclass(frozen=True)
class Outcome:
    """One answer, with measured seconds and bytes."""

    method: str
    budget: int | float | str | None  # None: `full` has none
    answer: str
    prompt_tokens: int
    context_length: int  # the model's
    new_tokens: int
    kept_per_head: float
    kept: dict[str, float]  # by prompt and answer
    bytes: int
    full_bytes: int
    index_bytes: int
    host_bytes: int
    first_token_s: float
    tokens_per_s: float | None  # None after a single token
    coverage: float | None = None  # of the scores, by what is kept, if that decides how much it is
    exact: dict[str, int] | None = None  # of an exact answer: passes over the history, tokens guessed and right ones


class Say:
    """Sets the text of the spinner, which `stop` removes; off a terminal every text is a line of a log."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar
        self.last = self.counted = time.monotonic()

    def __call__(self, text: str) -> None:
        self.bar.update(text)
        if not self.bar.is_shown:
            self.last = time.monotonic()
            typer.echo(text, err=True)

    def often(self, text: str) -> None:
        """Show texts that change all the time: a log gets one every PREFILL_LOG_S."""
        if self.bar.is_shown or time.monotonic() - self.last >= PREFILL_LOG_S:
            self(text)

    def count(self, done: int, total: int) -> None:
        """Show the rows that are done: a log gets a line every ROWS_LOG_S, and the last."""
        text = f"{done} of {total} rows"
        self.bar.update(text, done, total)
        if not self.bar.is_shown and (done == total or time.monotonic() - self.counted >= ROWS_LOG_S):
            self.counted = time.monotonic()
            self.note(text)

    def note(self, text: str) -> None:
        """A line of its own."""
        typer.echo(text, err=True)

    def stop(self) -> None:
        self.bar.stop()


@contextmanager
def busy(text: str) -> Iterator[Say]:
    """A bar with the time elapsed, on stderr; lines of a log where that is no terminal."""
    with Bar(text, delay=0.0) as bar:
        yield Say(bar)


def print_scores(rows: list[dict[str, Any]]) -> None:
    """Scores of questions by themselves, then those of conversations by turn."""
    talks = [row for row in rows if "turn" in row]
    if len(talks) < len(rows):
        _print_scores([row for row in rows if "turn" not in row])
    if talks:
        _print_turns(talks)


def _print_turns(rows: list[dict[str, Any]]) -> None:
    """A table for each task and way to ask: rows are configs, columns turns."""
    from kvkeep.evaluate import summary
    from kvkeep.evaluate.results import grouped

    places = grouped(((each.task, each.protocol), each) for each in summary.by_turn(rows))
    for (task, protocol), scores in places.items():
        full = next((each for each in scores if each.method == FULL), None)
        via, _, history = protocol.partition("-")
        typer.echo(f"{task}, {via}, history {history}: percent right by turn, {scores[0].n} questions")
        lines = [line for each in scores for line in _turns(each, full)]
        print_table(["method", "budget", *map(str, scores[0].by_turn), "all"], lines, keep_first=True)


def _turns(scores: Any, full: Any) -> list[list[str]]:
    """The line of a config, and a second one that compares it with `full`."""
    mine, most = ([*each.by_turn.values(), each.all] for each in (scores, full or scores))
    budget = "–" if scores.budget is None else str(scores.budget)
    lines = [[scores.method, budget, *(f"{score:.0f}" for score in mine)]]
    if full not in (None, scores):
        shares = (f"{100 * score / of:.0f}" if of else "–" for score, of in zip(mine, most, strict=True))
        lines.append(["", f"% of {FULL}", *shares])
    return lines


def _print_scores(rows: list[dict[str, Any]]) -> None:
    """Rows are configs, columns tasks: mean in percent [95 % interval] n; if too wide, a line for each."""
    from kvkeep.evaluate import summary

    found = {(c.protocol, c.method, c.budget, c.task): c for c in summary.summarize(rows)}
    tasks = list(dict.fromkeys(c.task for c in found.values()))
    places = list(dict.fromkeys(place[:3] for place in found))
    means = [summary.means({c.task: c.score for at, c in found.items() if at[:3] == place}) for place in places]
    names, lines = list(dict.fromkeys(name for mean in means for name in mean)), []
    for (protocol, method, budget), mean in zip(places, means, strict=True):
        scores = [found.get((protocol, method, budget, task)) for task in tasks]
        shown = [_score(cell) if cell else "–" for cell in scores]
        shown += [f"{mean[name]:.1f}" if name in mean else "–" for name in names]
        lines.append([protocol, method, "–" if budget is None else str(budget), *shown])
    tasks += names
    header = ["protocol", "method", "budget", *tasks]
    if fits(header, lines):
        return print_table(header, lines)
    for protocol in dict.fromkeys(line[0] for line in lines):
        typer.echo(protocol)
        mine = [line for line in lines if line[0] == protocol]
        each = ([task, *line[1:3], line[3 + i]] for i, task in enumerate(tasks) for line in mine if line[3 + i] != "–")
        print_table(["task", *header[1:3], "score"], list(each))


def _score(cell: Any) -> str:
    score = f"{cell.score:.1f} [{cell.low:.0f}, {cell.high:.0f}] n={cell.n}"
    return score if cell.score_per_character is None else f"{score}, per character {cell.score_per_character:.1f}"


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Notes on truncated prompts and missing chat templates."""
    from kvkeep.evaluate.results import grouped

    tasks = grouped((row["task"], row) for row in rows)
    found = [_too_long(task, mine) for task, mine in tasks.items() if any(row["truncated"] for row in mine)]
    if rows and all(row["template"] == "plain" for row in rows):
        found.append("no prompt went through a chat template: the tokenizer has none, or these tasks want none")
    return found


def _too_long(task: str, rows: list[dict[str, Any]]) -> str:
    """How many prompts were truncated, and for which methods if not for all."""
    cut = [row for row in rows if row["truncated"]]
    lost, asked = ({row["id"] for row in some} for some in (cut, rows))
    methods, every = (list(dict.fromkeys(row["method"] for row in some)) for some in (cut, rows))
    for_some = "" if methods == every else f" for {', '.join(methods)}"
    most = max(row["truncated"] for row in cut)
    return f"{task}: {len(lost)} of {len(asked)} prompts were too long{for_some} and lost up to {most} tokens"


def print_outcomes(outcomes: list[Outcome]) -> None:
    from kvkeep.cache.report import format_bytes, format_kept, held_share

    def row(name: str, cell: Callable[[Outcome], str], is_shown: bool = True) -> list[list[str]]:
        return [[name, *map(cell, outcomes)]] if is_shown else []

    has_full = any(each.method == FULL for each in outcomes)
    rows = [
        *row("answer", lambda each: each.answer, len(outcomes) > 1),
        *row("budget", lambda each: "–" if each.budget is None else str(each.budget)),
        *row("prompt tokens", _length),
        *row("kept per KV head", lambda each: format_kept(each.kept)),
        *row(
            "scores covered",
            lambda e: "–" if e.coverage is None else f"{e.coverage:.1%}",
            any(each.coverage for each in outcomes),
        ),
        *row("cache holds", lambda e: f"{format_bytes(e.bytes)} ({held_share(e.bytes, e.full_bytes):.0%})"),
        *row("offloaded", lambda each: format_bytes(each.host_bytes), any(each.host_bytes for each in outcomes)),
        *row("a full cache would hold", lambda each: format_bytes(each.full_bytes), not has_full),
        *row("verified", lambda each: verified(each.exact), any(each.exact for each in outcomes)),
        *row("time to first token", lambda each: f"{each.first_token_s:.2f} s"),
        *row("tokens per second", lambda each: f"{each.tokens_per_s:.1f}" if each.tokens_per_s else "–"),
    ]
    print_table(["", *_names(outcomes)], rows)
    if len(outcomes) > 1:
        typer.echo(NOISE)


def _names(outcomes: list[Outcome]) -> list[str]:
    """The method, with its budget where it was run with several."""
    budgets: dict[str, set[int | float | str | None]] = {}
    for each in outcomes:
        budgets.setdefault(each.method, set()).add(each.budget)
    return [each.method if len(budgets[each.method]) == 1 else f"{each.method} {each.budget}" for each in outcomes]


def verified(exact: dict[str, int] | None) -> str:
    """How an exact answer was verified."""
    if not exact or not exact["passes"]:
        return "–"
    return f"in {exact['passes']} passes; {exact['right']} of {exact['guessed']} guesses right"


def _length(outcome: Outcome) -> str:
    """Tokens of the prompt, and how that compares with the budget and the model's context length."""
    if outcome.method != FULL and isinstance(outcome.budget, int) and outcome.prompt_tokens <= outcome.budget:
        return f"{outcome.prompt_tokens:,} (the budget of {outcome.budget:,} holds them all)"
    beyond = outcome.prompt_tokens / outcome.context_length
    return f"{outcome.prompt_tokens:,}" + (f" ({beyond:.1f} × the model's context length)" if beyond > 1 else "")


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def fits(header: list[str], rows: list[list[str]]) -> bool:
    """Whether no cell has to be wrapped."""
    from rich.console import Console

    widths = (max(map(len, column)) for column in zip(header, *rows, strict=True))
    return sum(width + 2 for width in widths) + 2 <= Console().width


def print_table(header: list[str], rows: list[list[str]], keep_first: bool = False) -> None:
    """keep_first: never wrap the first column"""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(header):
        table.add_column(name, overflow="fold", no_wrap=keep_first and number == 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: brackets in an answer are not markup
    Console().print(table)
