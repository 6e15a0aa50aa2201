"""Prefill one context for many configs, then batches of configs that answer questions about it.

Methods that leave the attention of prefill as the model computes it share one forward pass over the context. Eviction
methods answer in one batch; nothing of a question or an answer is evicted or counted, whatever the method. Retrieval
methods, and long answers that have to stay within the budget, get a sequence each and decode as an independent batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.cache.report import Report
from kvkeep.compress.parse import parse
from kvkeep.engine.independent_batch import IndependentBatch
from kvkeep.engine.pooled_batch import PooledBatch, bin_pack, is_ragged
from kvkeep.engine.progress import now
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.engine.shared_prefill import prefill_shared
from kvkeep.model.hf_cache import context_length, execution_device

AT_ONCE = {"cpu": 2**31, "cuda": 2**32}  # bytes of keys and values in one batch of answers

Config = tuple[str, int | float | None]  # a method and its budget; "full" has none


class AnswerBatch(Protocol):
    """One row for each of one or more configs; every call is one forward pass."""

    def extend(self, ids: Tensor, keep: int = 1) -> Tensor:
        """ids [rows, q] -> logits of the last `keep` tokens, 0: of all [rows, keep, vocabulary]"""

    def select_rows(self, rows: Seq[int]) -> None:
        """Drop the other rows."""


@dataclass(frozen=True)
class PrefilledContext:
    """What one config keeps of a context after prefill."""

    config: Config
    cache: Cache
    report: Report
    logits: Tensor  # after the last token [vocabulary]
    prefill_s: float
    prefill_configs: int  # that shared the prefill
    sequence: Sequence | None = None  # of a config that is decoded by a sequence of its own


def prefill(
    model: Any, tokenizer: Any, ids: Tensor, configs: Seq[Config], long: bool, share: bool, question: str = ""
) -> list[PrefilledContext]:
    """Prefill a context with every config. ids [n]; question: where it is known before prefill"""
    too_long = len(ids) > context_length(model)  # left to methods that bound what a query attends to
    separate = [config for config in configs if long or too_long or _has_retrieval_window(config)]
    together = [config for config in configs if config not in separate]
    found: dict[Config, PrefilledContext] = {}
    for group in [together] if share and together else [[config] for config in together]:
        found |= {context.config: context for context in _prefill_shared(model, tokenizer, ids, group)}
    for config in separate:
        found[config] = _prefill_one(model, tokenizer, ids, config, long, question)
    return [found[config] for config in configs]


def _has_retrieval_window(config: Config) -> bool:
    retrieval = parse(config[0]).retrieval
    return retrieval is not None and retrieval.window is not None


def _prefill_shared(model: Any, tokenizer: Any, ids: Tensor, configs: Seq[Config]) -> list[PrefilledContext]:
    began = now(model.device)
    sequences = [_sequence(model, tokenizer, config) if parse(config[0]).retrieval else None for config in configs]
    caches = [
        sequence.cache if sequence else Cache(model, method, budget, schedule="prompt")
        for sequence, (method, budget) in zip(sequences, configs, strict=True)
    ]
    for sequence in filter(None, sequences):
        sequence.before_forward(ids)
    logits = prefill_shared(model, ids[None].to(execution_device(model)), caches)
    for sequence in filter(None, sequences):
        sequence.after_forward(ids, logits[None])
    seconds = now(model.device) - began
    return [
        PrefilledContext(config, cache, cache.report(), logits, seconds, len(configs), sequence)
        for config, cache, sequence in zip(configs, caches, sequences, strict=True)
    ]


def _prefill_one(
    model: Any, tokenizer: Any, ids: Tensor, config: Config, long: bool, question: str
) -> PrefilledContext:
    began = now(model.device)
    sequence = _sequence(model, tokenizer, config, long)
    if question:
        sequence.set_question(question, len(ids))
    logits = sequence.prefill(ids)
    seconds, own = now(model.device) - began, long or sequence.config.method.retrieval
    return PrefilledContext(
        config, sequence.cache, sequence.cache.report(), logits, seconds, 1, sequence if own else None
    )


def _sequence(model: Any, tokenizer: Any, config: Config, long: bool = True) -> Sequence:
    """long: the answer has to stay within the budget, too"""
    method = parse(config[0])
    own = method.retrieval or (long and (method.scorer is None or method.schedule.every is not None))
    options = {"schedule": None if own else "buffer" if long else "prompt"}
    return SequenceConfig(model, tokenizer, method, config[1], cache_options=options).new_sequence()


def answer_batches(
    model: Any, contexts: Seq[PrefilledContext], room: int, share: bool, question: str = ""
) -> Iterator[tuple[list[int], AnswerBatch]]:
    """Batches of configs with room for so many tokens, with their indices in `contexts`; made one at a time.

    question: where it was not known at prefill
    """
    pooled = [number for number, context in enumerate(contexts) if context.sequence is None]
    sizes = [max(n for layer in contexts[number].report.tokens for n in layer[0]) + room for number in pooled]
    for pack in bin_pack(sizes, _max_slots(contexts), is_ragged(model)) if share else [[i] for i in range(len(pooled))]:
        numbers = [pooled[i] for i in pack]
        yield numbers, PooledBatch(model, [contexts[number].cache for number in numbers], room)
    own = [number for number, context in enumerate(contexts) if context.sequence]
    for numbers in [own] if share and own else [[number] for number in own]:
        sequences = [contexts[number].sequence.fork() for number in numbers]
        for sequence in sequences if question else ():
            sequence.set_question(question, sequence.cache.seen)
        yield numbers, IndependentBatch(model, sequences)


def report_after(batch: AnswerBatch, contexts: Seq[PrefilledContext]) -> Callable[[], list[PrefilledContext]]:
    """-> call it after the answers: the contexts with new reports, where a sequence's cache has grown or evicted"""
    sequences = list(getattr(batch, "sequences", ()))  # listed now: finished rows leave the batch
    return lambda: [
        replace(context, report=sequence.cache.report()) if sequence else context
        for context, sequence in zip(contexts, sequences or [None] * len(contexts), strict=True)
    ]


def _max_slots(contexts: Seq[PrefilledContext]) -> int:
    """Of all layers and key heads, in one batch."""
    report, device = contexts[0].report, contexts[0].logits.device.type
    return AT_ONCE.get(device, AT_ONCE["cpu"]) // max(1, report.full_bytes // report.tokens_seen[0])
