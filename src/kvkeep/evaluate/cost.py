"""Time and memory of reading and writing, for every method, budget, length and batch, beside the uncompressed model.

Every figure of a table comes from one run on one machine, so ratios may be trusted where seconds may not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kvkeep.compress.allocate.heads import EqualHeads
from kvkeep.compress.method import parse
from kvkeep.engine.batch import Batch, Request
from kvkeep.engine.pool import Pool
from kvkeep.engine.session import Cache
from kvkeep.engine.words import Unfolding
from kvkeep.errors import BadParameter
from kvkeep.model.adapter import key_shape
from kvkeep.model.stock import stock_cache


@dataclass(frozen=True)
class Cost:
    """One measurement."""

    by: str  # "kvkeep", or "transformers", whose own cache holds everything
    method: str
    budget: int | float | None
    context: int
    batch: int
    prefill_s: float  # of one sequence
    prefill_ratio: float  # to transformers' own
    step_s: float  # median of one token for every sequence
    step_ratio: float
    tokens_per_s: float
    kv_bytes: int  # of one sequence, after the prompt
    peak_bytes: int  # of the device while reading; 0 where it cannot be measured

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """What is measured: everything with everything."""

    methods: tuple[str, ...]
    budgets: tuple[int | float, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    steps: int = 32
    piece: int | None = None  # tokens read at a time; None: all at once

    def __post_init__(self) -> None:
        for name, budget in product(self.methods, self.budgets):
            method = parse(name)
            method.check(budget)
            if method.recall:
                raise BadParameter(f"'{name}' fetches, and cannot be written as a batch; see benchmarks/passkey.py.")
        if min(self.contexts) < 2 or min(self.batches) < 1 or self.steps < 1:
            raise BadParameter("a measurement wants at least 2 tokens, 1 sequence and 1 step.")


def costs(model: Any, plan: Plan, say: Callable[[str], None] = lambda text: None) -> Iterator[Cost]:
    """The uncompressed model first, for every length and batch; each method after it."""
    for context in plan.contexts:
        ids = torch.arange(context, device=model.device) * 7919 % model.config.get_text_config().vocab_size
        say(f"{context:,} tokens, uncompressed")
        plain = _plain(model, ids, plan)
        yield from plain.values()
        for method, budget in product(plan.methods, plan.budgets):
            say(f"{context:,} tokens, {method} {budget}")
            cache, seconds, peak = _read(model, ids, partial(Cache, model, method, budget, schedule="prompt"), plan)
            for batch in plan.batches:
                step, base = _steps(model, cache, context, batch, plan.steps), plain[batch]
                yield Cost(
                    "kvkeep", method, budget, context, batch, seconds, seconds / base.prefill_s, step,
                    step / base.step_s, batch / step, cache.nbytes, peak,
                )  # fmt: skip


def _plain(model: Any, ids: Tensor, plan: Plan) -> dict[int, Cost]:
    """transformers with its own growing cache, by batch."""
    _read(model, ids[:64], lambda: stock_cache(model), plan)  # what is made once is made now
    cache, seconds, peak = _read(model, ids, lambda: stock_cache(model), plan)
    size = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    found = {}
    for batch in plan.batches:
        step = _plain_steps(model, cache, len(ids), batch, plan.steps)
        found[batch] = Cost(
            "transformers", "full", None, len(ids), batch, seconds, 1.0, step, 1.0, batch / step, size, peak
        )
    return found


def _read(model: Any, ids: Tensor, make: Callable[[], Any], plan: Plan) -> tuple[Any, float, int]:
    """-> a cache that has read the ids, how long that took, and the most memory it took beyond what was held"""
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    cache, began = make(), _now(model)
    size = plan.piece or len(ids)
    with torch.inference_mode():
        for start in range(0, len(ids), size):
            model(ids[None, start : start + size], past_key_values=cache, logits_to_keep=1)
    return cache, _now(model) - began, torch.cuda.max_memory_allocated() - held if cuda else 0


def _steps(model: Any, cache: Cache, context: int, rows: int, steps: int) -> float:
    """Median seconds of a token for each of so many copies of a sequence, written as a batch."""
    kv_heads, _ = key_shape(model)
    most = max(max(layer.row_lengths(0)) for layer in cache.store.values())
    total = max(sum(layer.row_lengths(0)) for layer in cache.store.values())
    room = steps + 4
    longest = most if isinstance(cache.method.heads, EqualHeads) else total
    pool = Pool(model, rows, rows * (total + kv_heads * room), longest + room)
    logits = torch.zeros(model.config.get_text_config().vocab_size, device=model.device)
    batch = Batch(model, lambda ids: (cache, logits), set(), pool)
    for _ in range(rows):
        batch.submit(Request(torch.zeros(context, dtype=torch.int64), Unfolding(_Mute()), room))
    batch.step()
    return median(_timed(model, batch.step) for _ in range(steps))


def _plain_steps(model: Any, cache: Any, context: int, rows: int, steps: int) -> float:
    if rows > 1:
        cache.batch_repeat_interleave(rows)
    token = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)

    def step() -> None:
        with torch.inference_mode():
            model(token, past_key_values=cache).logits.argmax(-1).tolist()

    step()
    seconds = median(_timed(model, step) for _ in range(steps))
    cache.crop(context)
    if rows > 1:
        cache.batch_select_indices(torch.tensor([0], device=model.device))
    return seconds


def _timed(model: Any, run: Callable[[], Any]) -> float:
    began = _now(model)
    run()
    return _now(model) - began


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class _Mute:
    """No tokenizer: what is written is noise."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""
