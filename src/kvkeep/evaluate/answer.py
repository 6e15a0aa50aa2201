"""Questions about one text -> rows: what every method answers at every budget, and what a score cannot go without."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from kvkeep.evaluate.choose import loglikelihoods, preferred, prompts
from kvkeep.evaluate.hold import Cell, Held, Row, hold, rows
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.metrics.answer import extract_answer
from kvkeep.evaluate.render import Prompt, render
from kvkeep.evaluate.sample import Sample
from kvkeep.model.adapter import trained_window
from kvkeep.model.prompt import ends

Answered = tuple[dict[str, Any], dict[str, Any]]  # a row, and what was timed
ONE_ANSWER = ("math", "aime")  # metrics of problems with one right answer, written behind the reasoning
MADE = ("version", "seed", "length", "depth", "words")  # what a sample says of how it was made
PACKAGES = ("kvkeep", "torch", "transformers", "jieba")  # that a row may depend on


@dataclass(frozen=True)
class Item:
    """Samples about one text, under one protocol: what one reading can serve."""

    protocol: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Answerer:
    """Answers items, each the same whoever answers it, and whenever."""

    model: Any
    tokenizer: Any
    cells: Sequence[Cell]
    share: bool = True  # one reading for all cells, one batch for their answers
    max_length: int | None = None  # tokens of a prompt; None: what the window has room for

    def __call__(self, item: Item) -> list[Answered]:
        by = self._chosen if item.samples[0].choices else self._written
        return list(by(item))

    @property
    def window(self) -> int:
        return min(trained_window(self.model), self.max_length or 2**31)

    def _hold(self, prompt: Prompt, sample: Sample) -> list[Held]:
        """Methods that can use a question know it while they read, if it is in what they read."""
        known = "" if len(prompt.question) else _asked(sample)
        return hold(self.model, self.tokenizer, prompt.context, self.cells, sample.long, self.share, known)

    def _rows(self, held: Sequence[Held], sample: Sample, prompt: Prompt, new: int) -> Iterator[tuple[list[int], Row]]:
        """Else before they are asked. new: tokens that follow the question"""
        unknown = _asked(sample) if len(prompt.question) else ""
        return rows(self.model, held, len(prompt.question) + new, self.share, unknown)

    def _written(self, item: Item) -> Iterator[Answered]:
        """Every sample's answers, from one reading wherever the text is the same to the last token."""
        readings: dict[tuple, list[Held]] = {}
        for sample in item.samples:
            prompt = render(self.tokenizer, sample, item.protocol, trained_window(self.model), self.max_length)
            text = tuple(prompt.context.tolist())
            if text not in readings:
                readings = {text: self._hold(prompt, sample)}
            for held, ids, timed in self._write(readings[text], prompt, sample):
                said = _cut(self.tokenizer.decode(ids, skip_special_tokens=True), sample.stops)
                score = METRICS[sample.metric](said, _references(sample), **sample.extra)
                facts = {"score": score, "answer": said, "new_tokens": len(ids)}
                facts |= {"cut": len(ids) == sample.max_new_tokens}  # it may have had more to say
                if sample.metric in ONE_ANSWER:
                    facts |= {"answered": extract_answer(said) is not None}
                yield self._row(item, sample, prompt, held, facts), {**_place(item, sample, held), **timed}

    def _write(
        self, held: Sequence[Held], prompt: Prompt, sample: Sample
    ) -> list[tuple[Held, list[int], dict[str, Any]]]:
        """-> for each cell, in order: what it wrote, and how long that took"""
        found: dict[int, tuple[Held, list[int], dict[str, Any]]] = {}
        began = time.perf_counter()
        for numbers, row in self._rows(held, sample, prompt, sample.max_new_tokens):
            writers = list(row.engines) if sample.long else []  # long answers are written by an engine each
            logits = torch.stack([held[number].logits for number in numbers])
            if len(prompt.question):
                logits = row.feed(prompt.question.expand(len(numbers), -1))[:, -1]
            first = time.perf_counter() - began
            written = Writing(self.tokenizer, sample, ends(self.model, self.tokenizer)).write(row, logits)
            seconds = time.perf_counter() - began
            steps = max(map(len, written))
            reports = [engine.cache.report() for engine in writers] or [held[number].report for number in numbers]
            for number, ids, report in zip(numbers, written, reports, strict=True):
                one = replace(held[number], report=report)
                found[number] = one, ids, {
                    "reading_s": one.seconds,
                    "readers": one.readers,
                    "first_token_s": one.seconds + first,
                    "answer_s": seconds,
                    "writers": len(numbers),
                    "tokens_per_s": steps / (seconds - first),  # of one of those written together
                }  # fmt: skip
            del row  # before the next batch is made
            began = time.perf_counter()
        return [found[number] for number in range(len(held))]

    def _chosen(self, item: Item) -> Iterator[Answered]:
        """Every choice weighed from what is kept."""
        for sample in item.samples:
            began = time.perf_counter()
            readings: dict[tuple, list[Held]] = {}
            weights: list[list[float]] = [[] for _ in self.cells]
            for prompt, ids in prompts(self.tokenizer, sample, item.protocol, self.window):
                text = tuple(prompt.context.tolist())
                if text not in readings:
                    readings[text] = self._hold(prompt, sample)
                held = readings[text]
                for numbers, row in self._rows(held, sample, prompt, len(ids)):
                    after = torch.stack([held[number].logits for number in numbers])
                    for number, weight in zip(numbers, loglikelihoods(row, after, prompt.question, ids), strict=True):
                        weights[number].append(weight)
            seconds = time.perf_counter() - began
            for one, mine in zip(held, weights, strict=True):
                score = METRICS[sample.metric](mine, **sample.extra)
                facts = {"score": score, "answer": preferred(sample, mine), "loglikelihoods": mine}
                facts |= {"score_per_character": METRICS["lm_eval_acc_norm"](mine, **sample.extra)}
                timed = {"seconds": seconds, "readers": one.readers}
                yield self._row(item, sample, prompt, one, facts), {**_place(item, sample, one), **timed}

    def _row(self, item: Item, sample: Sample, prompt: Prompt, held: Held, facts: dict[str, Any]) -> dict[str, Any]:
        """What a score cannot be compared without."""
        method, report = held.cache.method, held.report
        return {
            **_place(item, sample, held),
            **facts,
            "metric": sample.metric,
            "kept_per_head": report.kept_per_head,
            "bytes": report.bytes,
            "peak_bytes": report.peak_bytes,
            "full_bytes": report.full_bytes,
            "host_bytes": report.host_bytes,
            "index_bytes": report.index_bytes,
            "compressed": _compressed(sample, prompt, held),
            "budget_unit": _unit(held),
            "prompt_tokens": prompt.tokens,
            "positions": "moved" if method.place or (method.recall and method.recall.moves) else "kept",
            "template": prompt.template,
            "bos": prompt.bos,
            "truncation": prompt.rule,
            "truncated": prompt.cut,
            "max_new_tokens": sample.max_new_tokens,
            "stops": [*sorted(ends(self.model, self.tokenizer)), *sample.stops],
            "decoding": "greedy",
            "schedule": method.schedule.every,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": str(self.model.config._attn_implementation).removeprefix("kvkeep_"),
            "made": {name: sample.extra[name] for name in MADE if name in sample.extra},
            "packages": _versions(),
        }


@dataclass(frozen=True)
class Writing:
    """Greedy, until the model ends, a stop is written, or there is no room."""

    tokenizer: Any
    sample: Sample
    last: set[int]

    def write(self, row: Row, logits: Tensor) -> list[list[int]]:
        """Rows that are done leave when half of them are. logits [rows, vocabulary] -> ids of each"""
        ids: list[list[int]] = [[] for _ in logits]
        batch = open_ = list(range(len(ids)))
        logits = self._opening(logits) if self.sample.speaks else logits
        while open_:
            tokens = dict(zip(batch, logits.argmax(-1).tolist(), strict=True))
            open_ = [number for number in open_ if self._add(ids[number], tokens[number])]
            if open_ and 2 * len(open_) <= len(batch):
                row.take([batch.index(number) for number in open_])
                batch = open_
            if open_:
                logits = row.feed(torch.tensor([[tokens[number]] for number in batch]))[:, -1]
        return ids

    def _opening(self, logits: Tensor) -> Tensor:
        """Without what would end the answer before it begins."""
        words = (self.tokenizer(stop, add_special_tokens=False).input_ids[-1] for stop in self.sample.stops)
        return logits.index_fill(-1, torch.tensor([*self.last, *words], device=logits.device), float("-inf"))

    def _add(self, ids: list[int], token: int) -> bool:
        """-> whether there is more to say"""
        if token in self.last:
            return False
        ids.append(token)
        stops = self.sample.stops
        stopped = stops and any(stop in self.tokenizer.decode(ids).lstrip() for stop in stops)
        return not stopped and len(ids) < self.sample.max_new_tokens


def _asked(sample: Sample) -> str:
    """What a text is read for; nothing where the question is all there is."""
    return sample.question.strip() if sample.context else ""


def _place(item: Item, sample: Sample, held: Held) -> dict[str, Any]:
    method, budget = held.cell
    return {"task": sample.task, "id": sample.id, "protocol": item.protocol, "method": method, "budget": budget}


def _compressed(sample: Sample, prompt: Prompt, held: Held) -> str:
    method = held.cache.method
    if not (method.scorer or method.recall):
        return "nothing"
    if sample.long:
        return "decoding"
    return "context" if len(prompt.question) else "whole prompt"


def _references(sample: Sample) -> str | list[str]:
    """A problem of mathematics has one right answer; elsewhere any of several will do."""
    return sample.references[0] if sample.metric in ONE_ANSWER else list(sample.references)


def _unit(held: Held) -> str:
    if held.cell[1] is None:
        return "none"
    unit = "fraction of the tokens read" if isinstance(held.cell[1], float) else "tokens"
    return f"{unit} per key head, window included"


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name).split("+")[0]
        except PackageNotFoundError:  # it was not needed
            continue
    return found


def _cut(text: str, stops: Sequence[str]) -> str:
    """Up to the first stop; one before anything is said does not count."""
    for stop in stops:
        text = text.lstrip().split(stop)[0] if stop in text.lstrip() else text
    return text
