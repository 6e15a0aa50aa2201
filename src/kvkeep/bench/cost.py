"""Time and memory of reading and writing, for every method, budget, length and batch, beside the uncompressed model.

Every figure of a table comes from one run on one machine, so ratios may be trusted where seconds may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.bench.baselines import SPARE, Eager, Static
from kvkeep.bench.roofline import Floors
from kvkeep.bench.timing import paced, read
from kvkeep.cache.cache import Cache
from kvkeep.compress.parse import parse
from kvkeep.compress.schedule import as_schedule
from kvkeep.engine.detokenizer import Unfolding
from kvkeep.engine.row_pool import Pool, slots_of
from kvkeep.engine.scheduler import Batch, Request
from kvkeep.errors import BadParameter
from kvkeep.model.chunked_mlp import sliced

BASELINES = {"transformers": Eager, "static": Static}


@dataclass(frozen=True)
class Cost:
    """One measurement. None: there is no such figure, and the note says why."""

    by: str  # "kvkeep"; "transformers" or "static", whose caches hold everything; or another library
    method: str
    budget: int | float | None
    context: int
    batch: int
    prefill_s: float | None = None  # of one sequence
    prefill_ratio: float | None = None  # to transformers' own
    step_s: float | None = None  # median of one token for every sequence
    step_ratio: float | None = None
    tokens_per_s: float | None = None
    kv_bytes: int | None = None  # of one sequence, after the prompt
    peak_bytes: int | None = None  # of the device while reading; 0 where it cannot be measured
    floor_s: float | None = None  # a step's: linear layers once, and what is kept read once
    floor_by: str | None = None  # the larger of the two: "weights" or "cache"
    floor_ratio: float | None = None  # how many times its floor a step takes
    note: str = ""
    storage: str | None = None  # "int8" or "int4"; None: the model's own precision

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def label(self) -> str:
        """Who, which method, which budget, which storage."""
        if self.by in ("transformers", "static"):
            return {"transformers": "transformers", "static": "StaticCache"}[self.by]
        who = "" if self.by == "kvkeep" else f"{self.by}: "
        parts = (f"{who}{self.method}", "" if self.budget is None else str(self.budget), self.storage or "")
        return " ".join(filter(None, parts))

    def beside(self, base: Cost) -> Cost:
        """With its ratios to the uncompressed model."""
        ratios = _over(self.prefill_s, base.prefill_s), _over(self.step_s, base.step_s)
        return replace(self, prefill_ratio=ratios[0], step_ratio=ratios[1])

    def above(self, floors: Floors) -> Cost:
        """With its floor, where that was measured for its batch."""
        floor = None if self.kv_bytes is None else floors.under(self.batch, self.kv_bytes)
        if floor is None:
            return self
        return replace(self, floor_s=floor[0], floor_by=floor[1], floor_ratio=_over(self.step_s, floor[0]))


@dataclass(frozen=True)
class Plan:
    """What is measured: everything with everything."""

    methods: tuple[str, ...]
    budgets: tuple[int | float, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    steps: int = 32
    piece: int | None = None  # tokens read at a time; None: all at once
    readings: int = 1  # of which the quickest counts
    storages: tuple[str | None, ...] = (None,)
    baselines: tuple[str, ...] = ("transformers", "static")  # the first always, since ratios are to it

    def __post_init__(self) -> None:
        for name, budget in product(self.methods, self.budgets):
            method = parse(name)
            method.check(budget)
            for storage in self.storages:
                replace(method, schedule=as_schedule("prompt")).bits(storage)
            if method.recall:
                raise BadParameter(f"'{name}' fetches, and cannot be written as a batch; see benchmarks/passkey.py.")
        if min(self.contexts) < 2 or min(self.batches) < 1 or min(self.steps, self.readings) < 1:
            raise BadParameter("a measurement wants at least 2 tokens, 1 sequence, 1 step and 1 reading.")
        if strange := [name for name in self.baselines if name not in BASELINES]:
            raise BadParameter(f"no baseline named '{strange[0]}'; known: {', '.join(BASELINES)}.")


def costs(
    model: Any, plan: Plan, say: Callable[[str], None] = lambda text: None, floors: Floors | None = None
) -> Iterator[Cost]:
    """The uncompressed model first, for every length and batch; each method after it."""
    floors = floors or Floors.measured(model, plan.batches)
    names = [name for name in BASELINES if name == Eager.by or name in plan.baselines]
    kept = [Kept(model, *how) for how in product(plan.methods, plan.budgets, plan.storages)]
    for context in plan.contexts:
        ids = torch.arange(context, device=model.device) * 7919 % model.config.get_text_config().vocab_size
        base: dict[int, Cost] = {}
        everyone: list[Any] = [*(BASELINES[name](model) for name in names), *kept]
        for who in everyone:
            say(" ".join(str(word) for word in (f"{context:,} tokens,", who.by, who.method, who.budget or "")))
            for cost in _measured(model, who, ids, plan, warm=context == plan.contexts[0]):
                yield cost.beside(base.setdefault(cost.batch, cost)).above(floors)


def _measured(model: Any, who: Any, ids: Tensor, plan: Plan, warm: bool) -> Iterator[Cost]:
    """One sequence read, then copies of it written, by batch; what does not fit is noted."""
    make = partial(who.make, len(ids) + plan.steps + SPARE)
    how = partial(sliced, model) if who.by == Kept.by else nullcontext  # as our engine reads
    storage = getattr(who, "storage", None)
    empty = [Cost(who.by, who.method, who.budget, len(ids), batch, storage=storage) for batch in plan.batches]
    try:
        if warm:
            read(
                model, ids[: max(64, int(2 * (who.budget or 0)))], make, plan.piece, how
            )  # what is made once is made now
        cache, seconds, peak = read(model, ids, make, plan.piece, how)
        for _ in range(plan.readings - 1):
            cache = None  # there may be room for one only
            cache, again, peak = read(model, ids, make, plan.piece, how)
            seconds = min(seconds, again)
    except torch.OutOfMemoryError:
        cache = None
    for cost in empty:
        if cache is None:
            yield replace(cost, note="reading runs out of memory")
            continue
        step, note = _stepped(who, cache, cost, plan.steps)
        rate = None if step is None else cost.batch / step
        yield replace(
            cost, prefill_s=seconds, step_s=step, tokens_per_s=rate, kv_bytes=who.nbytes(cache), peak_bytes=peak,
            note=note,
        )  # fmt: skip


def _stepped(who: Any, cache: Any, cost: Cost, steps: int) -> tuple[float | None, str]:
    """Median seconds of a step, and what to know of it."""
    try:
        return who.step_seconds(cache, cost.context, cost.batch, steps)
    except torch.OutOfMemoryError:
        return None, "writing runs out of memory"


def _over(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None or theirs is None else mine / theirs


@dataclass(frozen=True)
class Kept:
    """A method of ours, its sequences written together from a pool."""

    model: Any
    method: str
    budget: int | float
    storage: str | None = None
    by: ClassVar[str] = "kvkeep"

    def make(self, tokens: int) -> Cache:
        return Cache(self.model, self.method, self.budget, schedule="prompt", storage=self.storage)

    def nbytes(self, cache: Cache) -> int:
        return cache.nbytes

    def step_seconds(self, cache: Cache, context: int, rows: int, steps: int) -> tuple[float, str]:
        room = steps + SPARE
        most = max(max(layer.row_lengths(0)) for layer in cache.store.values()) + room
        pool = Pool(self.model, rows, rows * slots_of(cache, room), most, self.storage)
        logits = torch.zeros(self.model.config.get_text_config().vocab_size, device=self.model.device)
        batch = Batch(self.model, lambda ids: (cache, logits), set(), pool)
        for _ in range(rows):
            batch.submit(Request(torch.zeros(context, dtype=torch.int64), Unfolding(_Mute()), room))
        batch.step()
        return paced(batch.step, steps), ""


class _Mute:
    """No tokenizer: what is written is noise."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""
