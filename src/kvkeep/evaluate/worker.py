"""Questions about one text -> rows: what every method answers at every budget, and what a score cannot go without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvkeep.compress.parse import parse
from kvkeep.engine.progress import now
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.metrics.answer import extract_answer
from kvkeep.evaluate.multiple_choice import loglikelihoods, preferred, prompts
from kvkeep.evaluate.prefill import Cell, Held, Row, hold, reporting, rows
from kvkeep.evaluate.prompt import Prompt, render
from kvkeep.evaluate.sample import Sample
from kvkeep.model.chat import ends
from kvkeep.model.hf_cache import ENDLESS, trained_window

Answered = tuple[dict[str, Any], dict[str, Any]]  # a row, and what was timed
ONE_ANSWER = ("math", "aime")  # metrics of problems with one right answer, written behind the reasoning
MADE = ("version", "seed", "length", "depth", "words", "splitter", "asked", "capped")  # what a sample says of itself
PACKAGES = ("kvkeep", "torch", "transformers", "jieba")  # that a row may depend on
BACK_ENDS = {"code_sim": "difflib"}  # of metrics that elsewhere have others


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
    beyond_window: bool = False  # methods that can read longer prompts than the window has room for do

    def __call__(self, item: Item) -> Iterator[Answered]:
        """Sample by sample."""
        by = self._chosen if item.samples[0].choices else self._written
        return by(item)

    @property
    def window(self) -> int:
        return min(trained_window(self.model), self.max_length or ENDLESS)

    @property
    def reaches(self) -> dict[int, list[Cell]]:
        """How many tokens cells can read, answer included."""
        found: dict[int, list[Cell]] = {}
        for cell in self.cells:
            beyond = self.beyond_window and parse(cell[0]).endless
            found.setdefault(ENDLESS if beyond else trained_window(self.model), []).append(cell)
        return found

    def _hold(self, prompt: Prompt, sample: Sample, cells: Sequence[Cell]) -> list[Held]:
        """Methods that can use a question know it while they read, if it is in what they read."""
        known = "" if len(prompt.question) else _asked(sample)
        return hold(self.model, self.tokenizer, prompt.context, cells, sample.long, self.share, known)

    def _rows(self, held: Sequence[Held], sample: Sample, prompt: Prompt, new: int) -> Iterator[tuple[list[int], Row]]:
        """Else before they are asked. new: tokens that follow the question"""
        unknown = _asked(sample) if len(prompt.question) else ""
        return rows(self.model, held, len(prompt.question) + new, self.share, unknown)

    def _written(self, item: Item) -> Iterator[Answered]:
        """Every sample's answers, from one reading wherever the text is the same to the last token."""
        readings: dict[int, tuple[Tensor, list[Held]]] = {}
        for sample, (reach, cells) in product(item.samples, self.reaches.items()):
            prompt = render(self.tokenizer, sample, item.protocol, reach, self.max_length)
            if reach not in readings or not readings[reach][0].equal(prompt.context):
                readings[reach] = prompt.context, self._hold(prompt, sample, cells)
            for held, ids, timed in self._write(readings[reach][1], prompt, sample):
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
        began = now(self.model.device)
        for numbers, row in self._rows(held, sample, prompt, sample.max_new_tokens):
            mine = [held[number] for number in numbers]
            report = reporting(row, mine)
            logits = torch.stack([one.logits for one in mine])
            if len(prompt.question):
                logits = row.feed(prompt.question.expand(len(numbers), -1))[:, -1]
            first = now(self.model.device) - began
            writing = Writing(self.tokenizer, sample, ends(self.model, self.tokenizer))
            written = writing.write(row, logits)
            seconds = now(self.model.device) - began
            for number, ids, one in zip(numbers, written, report(), strict=True):
                found[number] = one, ids, {
                    "reading_s": one.seconds,
                    "readers": one.readers,
                    "first_token_s": one.seconds + first,
                    "answer_s": seconds,
                    "writers": len(numbers),
                    "tokens_per_s": writing.passes / (seconds - first) if writing.passes else None,  # of each together
                }  # fmt: skip
            del row, report  # before the next batch is made
            began = now(self.model.device)
        return [found[number] for number in range(len(held))]

    def _chosen(self, item: Item) -> Iterator[Answered]:
        """Every choice weighed from what is kept."""
        for sample in item.samples:
            began = now(self.model.device)
            readings: dict[tuple, list[Held]] = {}
            weights: list[list[float]] = [[] for _ in self.cells]
            for prompt, ids in prompts(self.tokenizer, sample, item.protocol, self.window):
                text = tuple(prompt.context.tolist())
                if text not in readings:
                    readings[text] = self._hold(prompt, sample, self.cells)
                held = list(readings[text])
                for numbers, row in self._rows(held, sample, prompt, len(ids)):
                    report = reporting(row, [held[number] for number in numbers])
                    after = torch.stack([held[number].logits for number in numbers])
                    found = loglikelihoods(row, after, prompt.question, ids)
                    for number, weight, one in zip(numbers, found, report(), strict=True):
                        weights[number].append(weight)
                        held[number] = one
            seconds = now(self.model.device) - began
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
            "device": self.model.device.type,
            "attention": str(self.model.config._attn_implementation).removeprefix("kvkeep_"),
            "made": {name: sample.extra[name] for name in MADE if name in sample.extra},
            "packages": versions(),
        }


@dataclass
class Writing:
    """Greedy, until the model ends, a stop is written, or there is no room."""

    tokenizer: Any
    sample: Sample
    last: set[int]
    passes: int = 0  # that were made of the model

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
                self.passes += 1
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
def versions() -> dict[str, str]:
    """What rows depend on beside their model and sample."""
    found = dict(BACK_ENDS)
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
