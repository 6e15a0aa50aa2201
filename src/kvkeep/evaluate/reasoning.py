"""Long answers in bounded memory: problems in, one row per written solution out.

The memory is watched at every step, so a row says what a cache held at most, not what it was told to hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.errors import BadInput, BadParameter
from kvkeep.evaluate.metrics import METRICS
from kvkeep.evaluate.metrics.answer import extract_answer
from kvkeep.evaluate.sample import Sample
from kvkeep.model.chat import encode, ends
from kvkeep.model.hf_cache import trained_window

ASK = "{question}\n\nReason step by step, and put the final answer in \\boxed{{}}."


@dataclass(frozen=True)
class Writing:
    """How solutions are written. temperature 0 is greedy; otherwise `samples` of each problem are drawn."""

    method: str
    budget: int | float | None = None
    schedule: str | int | None = None  # the method's own
    parameters: dict[str, Any] = field(default_factory=dict)
    max_new_tokens: int = 8192
    temperature: float = 0.0
    top_p: float = 0.95
    samples: int = 1
    seed: int = 0
    ask: str = ASK

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.samples < 1 or self.temperature < 0:
            raise BadParameter("max_new_tokens and samples are at least 1, temperature at least 0.")
        if self.samples > 1 and not self.temperature:
            raise BadParameter(f"{self.samples} greedy samples would be the same; set a temperature.")
        if "{question}" not in self.ask:
            raise BadParameter("ask= must say where the {question} goes.")


def solve(model: Any, tokenizer: Any, problems: Iterable[Sample], writing: Writing) -> Iterator[dict[str, Any]]:
    """One row for every sample of every problem, as it is finished."""
    for problem in problems:
        for number in range(writing.samples):
            torch.manual_seed(writing.seed + number)
            yield _row(model, tokenizer, problem, number, writing)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy is the mean over all samples (pass@1)."""
    if not rows:
        raise BadInput("there are no rows to sum up.")
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in ("score", "new_tokens", "tokens_per_s")}
    return {
        "problems": len({(row["task"], row["id"]) for row in rows}),
        "rows": len(rows),
        "accuracy": mean["score"],
        "answered": sum(row["answered"] for row in rows),
        "cut_without_answer": sum(row["cut"] and not row["answered"] for row in rows),
        "new_tokens": mean["new_tokens"],
        "tokens_per_s": mean["tokens_per_s"],
        "most_kept": max(row["most_kept"] for row in rows),
        "most_bytes": max(row["most_bytes"] for row in rows),
    }


def _row(model: Any, tokenizer: Any, problem: Sample, number: int, writing: Writing) -> dict[str, Any]:
    cache = Cache(model, writing.method, writing.budget, schedule=writing.schedule, **writing.parameters)
    prompt = encode(tokenizer, writing.ask.format(question=problem.question)).to(model.device)
    room = _room(model, cache, prompt.shape[1], writing.max_new_tokens, problem.id)
    watch, began = Watch(cache), time.perf_counter()
    sampling = {"temperature": writing.temperature, "top_p": writing.top_p} if writing.temperature else {}
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=room,
        do_sample=bool(writing.temperature), stopping_criteria=[watch], **sampling,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    new = output[0, prompt.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    return {
        "task": problem.task,
        "id": problem.id,
        "sample": number,
        "method": writing.method,
        "budget": writing.budget,
        "schedule": cache.method.schedule.every,
        "temperature": writing.temperature,
        "max_new_tokens": room,
        "prompt_tokens": prompt.shape[1],
        "new_tokens": len(new),
        "cut": len(new) == room and int(new[-1]) not in ends(model, tokenizer),
        "answered": extract_answer(text) is not None,
        "score": METRICS[problem.metric](text, problem.references[0], **problem.extra),
        "most_kept": watch.most_kept,
        "most_bytes": watch.most_bytes,
        "full_bytes": cache.report().full_bytes,
        "tokens_per_s": len(new) / seconds,
        "answer": text,
    }


class Watch:
    """Called by generate after every token: notes the most a cache ever held."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.most_kept, self.most_bytes = cache, 0.0, 0

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        report = self.cache.report()
        self.most_kept = max(self.most_kept, report.kept_per_head)
        self.most_bytes = max(self.most_bytes, report.bytes + report.index_bytes)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def _room(model: Any, cache: Cache, prompt: int, wanted: int, name: str) -> int:
    """Tokens the answer may take: where keys stay at their positions, no further than the model was trained."""
    if cache.method.place:
        return wanted
    room = min(wanted, trained_window(model) - prompt)
    if room < 1:
        raise BadInput(f"problem '{name}' has {prompt} tokens and fills the model's window of {trained_window(model)}.")
    return room
