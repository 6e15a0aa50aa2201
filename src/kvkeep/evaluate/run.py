"""Task × method × budget × protocol -> rows. One reading of a prompt serves every method and budget that allows it.

rows.jsonl holds what is the same whenever it is measured, so a run that was killed and continued ends with the same
file; times.jsonl holds what was timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.compress.method import check_budget, parse
from kvkeep.engine.fan import can_share, read
from kvkeep.engine.report import Report
from kvkeep.engine.session import Cache
from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate.choose import loglikelihood, preferred, prompts
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.render import PROTOCOLS, Prompt, render
from kvkeep.evaluate.rows import Rows
from kvkeep.evaluate.sample import Sample
from kvkeep.model.adapter import trained_window
from kvkeep.model.prompt import ends

Budget = int | float | None


@dataclass(frozen=True)
class Grid:
    """What every sample is answered with."""

    methods: tuple[str, ...]
    budgets: tuple[int | float, ...]
    protocols: tuple[str, ...] = PROTOCOLS

    def __post_init__(self) -> None:
        for name in self.protocols:
            if name not in PROTOCOLS:
                raise BadParameter(f"protocol '{name}' is not known; use {' or '.join(PROTOCOLS)}.")
        for method, budget in self.cells:
            if budget is not None:
                parse(method).check(check_budget(budget))

    @property
    def cells(self) -> list[tuple[str, Budget]]:
        """Methods with each budget; what keeps everything has none."""
        cells: list[tuple[str, Budget]] = []
        for method in self.methods:
            known = parse(method)
            cells += product([method], self.budgets if known.scorer or known.recall else [None])
        return cells


def run(
    model: Any,
    tokenizer: Any,
    samples: Sequence[Sample],
    grid: Grid,
    out: str | Path,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Answer what is not answered yet. -> all rows"""
    check_ids(samples)
    rows, times = Rows(Path(out) / "rows.jsonl"), Rows(Path(out) / "times.jsonl")
    total = len(samples) * len(grid.protocols) * len(grid.cells)
    for sample, protocol in product(samples, grid.protocols):
        place = (sample.task, sample.id, protocol)
        todo = [cell for cell in grid.cells if (*place, *cell) not in rows.done]
        answer = _choices if sample.choices else _answers
        for row, timed in answer(model, tokenizer, sample, protocol, todo) if todo else ():
            if (*place, row["method"], row["budget"]) not in times.done:
                times.append(timed)
            rows.append(row)
            if progress:
                progress(len(rows.rows), total)
    if len(rows.rows) != total:
        raise BadInput(f"{str(out)!r} holds {len(rows.rows)} rows, this run has {total}: use a folder of its own.")
    return rows.rows


def check_ids(samples: Sequence[Sample]) -> None:
    seen: set[tuple[str, str]] = set()
    for sample in samples:
        if (sample.task, sample.id) in seen:
            raise BadInput(f"{sample.task} has the id '{sample.id}' twice; give every sample its own.")
        seen.add((sample.task, sample.id))


def _choices(
    model: Any, tokenizer: Any, sample: Sample, protocol: str, cells: Sequence[tuple[str, Budget]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A row and its times for each cell: every choice weighed from what is kept."""
    found: list[list[float]] = [[] for _ in cells]
    began = time.perf_counter()
    for prompt, ids in prompts(tokenizer, sample, protocol, trained_window(model)):
        caches = [Cache(model, method, budget) for method, budget in cells]
        after = _read(model, prompt.context.to(model.device), caches)
        held = [cache.report() for cache in caches]
        for likelihoods, cache, logits in zip(found, caches, after, strict=True):
            if len(prompt.question):
                logits = _feed(model, cache, prompt.question)
            likelihoods.append(loglikelihood(model, cache, logits, ids))
    seconds = time.perf_counter() - began
    for (method, budget), likelihoods, cache, report in zip(cells, found, caches, held, strict=True):
        place = {"task": sample.task, "id": sample.id, "protocol": protocol, "method": method, "budget": budget}
        facts = {
            **place,
            "score": METRICS[sample.metric](likelihoods, **sample.extra),
            "answer": preferred(sample, likelihoods),
            "loglikelihoods": likelihoods,
            **_facts(model, tokenizer, cache, prompt, sample, report),
        }
        yield facts, {**place, "seconds": seconds, "readers": len(cells)}


def _answers(
    model: Any, tokenizer: Any, sample: Sample, protocol: str, cells: Sequence[tuple[str, Budget]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A row and its times for each cell, from one reading where methods allow it."""
    prompt = render(tokenizer, sample, protocol, trained_window(model))
    caches = [Cache(model, method, budget) for method, budget in cells]
    began = time.perf_counter()
    after = _read(model, prompt.context.to(model.device), caches)
    reading = time.perf_counter() - began
    for (method, budget), cache, logits in zip(cells, caches, after, strict=True):
        held = cache.report()
        began = time.perf_counter()
        if len(prompt.question):
            logits = _feed(model, cache, prompt.question)
        first = time.perf_counter() - began
        ids = _write(model, tokenizer, cache, logits, sample)
        text = _cut(tokenizer.decode(ids, skip_special_tokens=True), sample.stops)
        place = {"task": sample.task, "id": sample.id, "protocol": protocol, "method": method, "budget": budget}
        facts = {
            **place,
            "score": METRICS[sample.metric](text, _references(sample), **sample.extra),
            "answer": text,
            "new_tokens": len(ids),
            **_facts(model, tokenizer, cache, prompt, sample, held),
        }
        seconds = time.perf_counter() - began
        yield facts, {**place, "reading_s": reading, "readers": len(cells), "first_s": first, "answer_s": seconds}


def _facts(model: Any, tokenizer: Any, cache: Cache, prompt: Prompt, sample: Sample, held: Report) -> dict[str, Any]:
    """What a score cannot be compared without."""
    moved = cache.method.place or (cache.method.recall and cache.method.recall.moves)
    return {
        "metric": sample.metric,
        "kept_per_head": held.kept_per_head,
        "bytes": held.bytes,
        "full_bytes": held.full_bytes,
        "host_bytes": held.host_bytes,
        "index_bytes": held.index_bytes,
        "compressed": "context" if len(prompt.question) else "whole prompt",
        "budget_unit": _unit(cache),
        "prompt_tokens": prompt.tokens,
        "positions": "moved" if moved else "kept",
        "template": prompt.template,
        "bos": prompt.bos,
        "truncation": "middle of the context",
        "truncated": prompt.cut,
        "max_new_tokens": sample.max_new_tokens,
        "stops": sorted(ends(model, tokenizer)),
        "decoding": "greedy",
        "schedule": cache.method.schedule.every,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": str(model.config._attn_implementation).removeprefix("kvkeep_"),
        "torch": torch.__version__.split("+")[0],
    }


def _references(sample: Sample) -> str | list[str]:
    """A problem of mathematics has one right answer; elsewhere any of several will do."""
    return sample.references[0] if sample.metric in ("math", "aime") else list(sample.references)


def _unit(cache: Cache) -> str:
    if not (cache.method.scorer or cache.method.recall):
        return "none"
    return "fraction of tokens" if isinstance(cache.budget, float) else "tokens per key head, everything included"


def _read(model: Any, ids: Tensor, caches: Sequence[Cache]) -> list[Tensor]:
    """Logits after the context, for each cache."""
    together = [cache for cache in caches if can_share(cache, len(ids))]
    shared = read(model, ids[None], together) if together else None
    return [shared if cache in together else _feed(model, cache, ids) for cache in caches]


def _feed(model: Any, cache: Cache, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids[None].to(model.device), past_key_values=cache, logits_to_keep=1).logits[0, -1]


def _write(model: Any, tokenizer: Any, cache: Cache, logits: Tensor, sample: Sample) -> list[int]:
    """Greedy, until the model ends, a stop is written, or there is no room."""
    ids: list[int] = []
    last = ends(model, tokenizer)
    while len(ids) < sample.max_new_tokens:
        token = int(logits.argmax())
        if token in last:
            break
        ids.append(token)
        if sample.stops and any(stop in tokenizer.decode(ids).lstrip() for stop in sample.stops):
            break
        if len(ids) < sample.max_new_tokens:
            logits = _feed(model, cache, torch.tensor([token]))
    return ids


def _cut(text: str, stops: Sequence[str]) -> str:
    """Up to the first stop; one before anything is said does not count."""
    for stop in stops:
        text = text.lstrip().split(stop)[0] if stop in text.lstrip() else text
    return text
