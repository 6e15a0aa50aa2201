"""Time and memory of prefill and decode, for every method, budget, length and batch, beside the uncompressed model.

All figures of a table come from one run on one machine, so ratios can be compared where seconds cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.bench.timing import Roofline, as_cuda_graph, median_interval, timed_prefill
from kvkeep.cache.cache import Cache
from kvkeep.compress.method import as_schedule
from kvkeep.compress.parse import parse
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import BadParameter
from kvkeep.model.chunked_mlp import chunked_mlp
from kvkeep.model.fused import fused_ops
from kvkeep.model.hf_cache import dynamic_cache, static_cache

SPARE = 4  # decode steps beside those that are timed
ALIGNED = 16  # fast attention kernels want masks of such lengths


@dataclass(frozen=True)
class Uncompressed:
    model: Any
    method: ClassVar[str] = "full"
    budget: ClassVar[None] = None

    def nbytes(self, cache: Any) -> int:
        return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


class Eager(Uncompressed):
    """A cache that grows by one token per step, without a CUDA graph."""

    by: ClassVar[str] = "transformers"

    def make(self, tokens: int) -> Any:
        return dynamic_cache(self.model)

    def step_seconds(self, cache: Any, context: int, rows: int, steps: int) -> tuple[float, str]:
        token = torch.zeros(rows, 1, dtype=torch.int64, device=self.model.device)

        def step() -> None:
            with torch.inference_mode():
                self.model(token, past_key_values=cache).logits.argmax(-1).tolist()

        try:
            if rows > 1:
                cache.batch_repeat_interleave(rows)
            step()
            return median_interval(step, steps), ""
        finally:  # back to the prefilled cache, even after an error
            for layer in cache.layers:
                layer.keys, layer.values = (t[:1, :, :context].clone() for t in (layer.keys, layer.values))


class Static(Uncompressed):
    """A cache of fixed size, so that a step can be captured; attention covers its whole length under a mask."""

    by: ClassVar[str] = "static"

    def make(self, tokens: int) -> Any:
        return static_cache(self.model, -(-tokens // ALIGNED) * ALIGNED)

    def step_seconds(self, cache: Any, context: int, rows: int, steps: int) -> tuple[float, str]:
        step = StaticSteps(self.model, self._copies(cache, context, rows, steps), context, rows)
        step()
        not_captured = self.model.device.type == "cuda" and step.graph is None
        note = "not captured in a graph" if not_captured else ""
        return median_interval(lambda: (step(), step.tokens.tolist()), steps), note

    def _copies(self, cache: Any, context: int, rows: int, steps: int) -> Any:
        """A cache of `rows` copies of the sequence."""
        made = self.make(context + steps + SPARE)
        with torch.inference_mode():
            for mine, theirs in zip(made.layers, cache.layers, strict=True):
                mine.update(*(t[:, :, :context].expand(rows, -1, -1, -1) for t in (theirs.keys, theirs.values)))
        return made


class StaticSteps:
    """Every call decodes one token of every row, greedily.

    The cache counts its tokens on the device, and transformers takes positions and mask from that count, so a replayed
    graph advances by itself.
    """

    def __init__(self, model: Any, cache: Any, context: int, rows: int) -> None:
        self.model, self.cache = model, cache
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
        with torch.inference_mode():
            self.graph = as_cuda_graph(self._run, model.device)
            self.tokens.zero_()
            for layer in cache.layers:
                layer.cumulative_length.fill_(context)  # the capture has run some steps

    def __call__(self) -> Tensor:
        """-> logits [rows, vocabulary]"""
        with torch.inference_mode():
            return self.graph() if self.graph else self._run()

    def _run(self) -> Tensor:
        logits = self.model(self.tokens, past_key_values=self.cache).logits[:, -1]
        torch.argmax(logits, -1, keepdim=True, out=self.tokens)
        return logits


BASELINES = {"transformers": Eager, "static": Static}


@dataclass(frozen=True)
class Cost:
    """One measurement. None: not measured, and the note says why."""

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
    peak_bytes: int | None = None  # of device memory in prefill; 0 where it cannot be measured
    roofline_s: float | None = None  # of a step: linear layers once, and the kept cache read once
    bound_by: str | None = None  # the larger of the two: "weights" or "cache"
    roofline_ratio: float | None = None  # step_s / roofline_s
    note: str = ""
    storage: str | None = None  # "int8" or "int4"; None: the model's own precision

    @property
    def label(self) -> str:
        """Library, method, budget and storage."""
        if self.by in ("transformers", "static"):
            return {"transformers": "transformers", "static": "StaticCache"}[self.by]
        library = "" if self.by == "kvkeep" else f"{self.by}: "
        parts = (f"{library}{self.method}", "" if self.budget is None else str(self.budget), self.storage or "")
        return " ".join(filter(None, parts))

    def with_ratios(self, base: Cost) -> Cost:
        """Add the ratios to the uncompressed model."""
        ratios = _ratio(self.prefill_s, base.prefill_s), _ratio(self.step_s, base.step_s)
        return replace(self, prefill_ratio=ratios[0], step_ratio=ratios[1])

    def with_roofline(self, roofline: Roofline) -> Cost:
        """Where it was measured for this batch."""
        bound = None if self.kv_bytes is None else roofline.step_time(self.batch, self.kv_bytes)
        if bound is None:
            return self
        return replace(self, roofline_s=bound[0], bound_by=bound[1], roofline_ratio=_ratio(self.step_s, bound[0]))


@dataclass(frozen=True)
class Plan:
    """What is measured: the product of all fields."""

    methods: tuple[str, ...]
    budgets: tuple[int | float, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    steps: int = 32
    prefill_chunk_size: int | None = None  # None: the whole prompt
    prefill_repeats: int = 1  # of which the fastest counts
    storages: tuple[str | None, ...] = (None,)
    baselines: tuple[str, ...] = ("transformers", "static")  # the first always, since ratios are to it

    def __post_init__(self) -> None:
        for name, budget in product(self.methods, self.budgets):
            method = parse(name)
            method.check(budget)
            for storage in self.storages:
                replace(method, schedule=as_schedule("prompt")).bits(storage)
            if method.retrieval:
                raise BadParameter(f"'{name}' retrieves, and has no batched decode; see benchmarks/passkey.py.")
        if min(self.contexts) < 2 or min(self.batches) < 1 or min(self.steps, self.prefill_repeats) < 1:
            raise BadParameter("a measurement needs at least 2 tokens, 1 sequence, 1 step and 1 prefill.")
        if unknown := [name for name in self.baselines if name not in BASELINES]:
            raise BadParameter(f"no baseline named '{unknown[0]}'; known: {', '.join(BASELINES)}.")


def costs(
    model: Any, plan: Plan, say: Callable[[str], None] = lambda text: None, roofline: Roofline | None = None
) -> Iterator[Cost]:
    """Measure, for every length and batch, the uncompressed model first, then each method."""
    roofline = roofline or Roofline.measure(model, plan.batches)
    names = [name for name in BASELINES if name == Eager.by or name in plan.baselines]
    compressed = [Compressed(model, *config) for config in product(plan.methods, plan.budgets, plan.storages)]
    for context in plan.contexts:
        ids = torch.arange(context, device=model.device) * 7919 % model.config.get_text_config().vocab_size
        base: dict[int, Cost] = {}
        contenders: list[Any] = [*(BASELINES[name](model) for name in names), *compressed]
        for each in contenders:
            say(" ".join(str(word) for word in (f"{context:,} tokens,", each.by, each.method, each.budget or "")))
            for cost in _measure(model, each, ids, plan, warm=context == plan.contexts[0]):
                yield cost.with_ratios(base.setdefault(cost.batch, cost)).with_roofline(roofline)


def _measure(model: Any, subject: Any, ids: Tensor, plan: Plan, warm: bool) -> Iterator[Cost]:
    """Prefill one sequence, then decode batches of copies of it; running out of memory becomes a note."""
    make = partial(subject.make, len(ids) + plan.steps + SPARE)
    within = partial(_as_engine, model) if subject.by == Compressed.by else nullcontext
    storage = getattr(subject, "storage", None)
    named = partial(Cost, subject.by, subject.method, subject.budget, len(ids), storage=storage)
    try:
        if warm:
            few = ids[: max(64, int(2 * (subject.budget or 0)))]
            timed_prefill(model, few, make, plan.prefill_chunk_size, within)  # compiles kernels
        cache, seconds, peak = timed_prefill(model, ids, make, plan.prefill_chunk_size, within)
        for _ in range(plan.prefill_repeats - 1):
            cache = None  # freed first: there may be memory for one only
            cache, again, peak = timed_prefill(model, ids, make, plan.prefill_chunk_size, within)
            seconds = min(seconds, again)
    except torch.OutOfMemoryError:
        cache = None
    for cost in map(named, plan.batches):
        if cache is None:
            yield replace(cost, note="prefill runs out of memory")
            continue
        step, note = _decode(subject, cache, cost, plan.steps)
        rate = None if step is None else cost.batch / step
        yield replace(
            cost, prefill_s=seconds, step_s=step, tokens_per_s=rate, kv_bytes=subject.nbytes(cache), peak_bytes=peak,
            note=note,
        )  # fmt: skip


@contextmanager
def _as_engine(model: Any) -> Iterator[None]:
    """How `Engine` runs a forward pass."""
    with fused_ops(model), chunked_mlp(model):
        yield


def _decode(subject: Any, cache: Any, cost: Cost, steps: int) -> tuple[float | None, str]:
    """Median seconds of a step, and a note."""
    try:
        return subject.step_seconds(cache, cost.context, cost.batch, steps)
    except torch.OutOfMemoryError:
        return None, "decode runs out of memory"


def _ratio(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None or theirs is None else mine / theirs


@dataclass(frozen=True)
class Compressed:
    """A method of kvkeep; all sequences are decoded as one batch."""

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
        """All rows are copies of one sequence."""
        config = SequenceConfig(self.model, _NullTokenizer(), cache.method, self.budget)
        ids, logits = torch.zeros(context, dtype=torch.int64), torch.zeros(1, device=self.model.device)
        sequence, generation = Sequence(config, cache, ids.tolist()), Generation(steps + SPARE)
        scheduler = Scheduler(self.model, set(), rows)
        for _ in range(rows):
            scheduler.submit(Request(config, ids, generation, sequence, logits=logits))
        for _ in range(2):  # admit all, capture
            scheduler.step()
        return median_interval(scheduler.step, steps), ""


class _NullTokenizer:
    """The decoded ids are noise."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""
