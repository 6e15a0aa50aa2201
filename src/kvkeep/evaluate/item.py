"""What a worker is asked, and what every row says beside its score."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvkeep.compress.method import Method
from kvkeep.evaluate.prefill import Config
from kvkeep.evaluate.sample import Sample
from kvkeep.model.chat import eos_token_ids

TimedRow = tuple[dict[str, Any], dict[str, Any]]  # a row of rows.jsonl, and one of times.jsonl
MADE = ("version", "seed", "length", "depth", "words", "splitter", "asked", "capped")  # how a sample was generated
PACKAGES = ("kvkeep", "torch", "transformers", "jieba")  # a row may depend on their versions
BACK_ENDS = {"code_sim": "difflib"}  # of metrics that have another back end elsewhere


@dataclass(frozen=True)
class Item:
    """Samples about one text, under one protocol: one prefill serves them all."""

    protocol: str
    samples: tuple[Sample, ...]


def row_key(item: Item, sample: Sample, config: Config) -> dict[str, Any]:
    """Name the row that this configuration's answer has."""
    method, budget = config
    return {"task": sample.task, "id": sample.id, "protocol": item.protocol, "method": method, "budget": budget}


def setting(model: Any, tokenizer: Any, sample: Sample, method: Method) -> dict[str, Any]:
    """Say what an answer depends on beside its prompt."""
    return {
        "positions": "moved" if method.placement or (method.retrieval and method.retrieval.moves_keys) else "kept",
        "max_new_tokens": sample.max_new_tokens,
        "stops": [*sorted(eos_token_ids(model, tokenizer)), *sample.stops],
        "decoding": "greedy",
        "schedule": method.schedule.every,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "attention": str(model.config._attn_implementation).removeprefix("kvkeep_"),
        "made": {name: sample.extra[name] for name in MADE if name in sample.extra},
        "packages": versions(),
    }


def budget_unit(config: Config, method: Method, most: int | float | None) -> str:
    """Say what the budget counts. most: tokens per KV head, where the scores decide"""
    _, budget = config
    if budget is None:
        return "none"
    if (needed := method.needed) is not None:
        what = f"scores above {needed.tau:g}" if needed.share is None else f"{needed.share:g} of the scores"
        return f"{what}, within {most} per KV head"
    unit = "fraction of the tokens read" if isinstance(budget, float) else "tokens"
    return f"{unit} per KV head, window included"


@cache
def versions() -> dict[str, str]:
    """Packages and back ends rows depend on, beside their model and sample."""
    found = dict(BACK_ENDS)
    for name in PACKAGES:
        try:
            found[name] = version(name).split("+")[0]
        except PackageNotFoundError:  # not installed, so not used
            continue
    return found
