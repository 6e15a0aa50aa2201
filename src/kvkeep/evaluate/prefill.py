"""Prefill one context for many configs, then ask questions about it.

Methods that leave the attention of prefill as the model computes it share one forward pass over the context. Every
question is asked on forks. Of eviction methods nothing of a question or an answer is evicted or counted; retrieval
methods retrieve for both, and answers of configs in `evicting` have to stay within the budget.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvkeep.cache.report import Report
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse_budget
from kvkeep.engine.progress import now
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.evaluate.shared_prefill import prefill_shared
from kvkeep.model.hf_cache import context_length, execution_device

Config = tuple[str, int | float | str | None]  # a method and its budget, "auto" or a number; "full" has none


@dataclass(frozen=True)
class PrefilledContext:
    """What one config keeps of a context after prefill."""

    config: Config
    sequence: Sequence
    report: Report
    logits: Tensor  # after the last token [vocabulary]
    prefill_s: float
    prefill_configs: int  # that shared the prefill
    is_frozen: bool  # nothing of a question or an answer is evicted or counted

    @property
    def method(self) -> Method:
        return self.sequence.cache.method

    def fork(self, question: str) -> Sequence:
        """Fork for one question. question: where it was not known at prefill"""
        fork = self.sequence.fork()
        if self.is_frozen:
            fork.cache.tracker.mark_context()
        elif question:
            fork.set_question(question, fork.cache.seen)
        return fork


def prefill(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    configs: Mapping[Config, Method],
    evicting: Collection[Config],
    share: bool,
    question: str = "",
) -> list[PrefilledContext]:
    """Prefill a context with every config.

    ids [n]
    evicting: the configs whose answers, too, have to stay within the budget
    question: where it is known before prefill
    """
    too_long = len(ids) > context_length(model)  # left to methods that bound what a query attends to
    sequences = {
        config: _sequence(model, tokenizer, config, method, config in evicting) for config, method in configs.items()
    }
    windowed = {config for config, method in configs.items() if method.retrieval and method.retrieval.window}
    separate = [config for config in configs if config in evicting or too_long or config in windowed]
    together = [config for config in configs if config not in separate]
    found: dict[Config, PrefilledContext] = {}
    for group in [together] if share and together else [[config] for config in together]:
        contexts = _prefill_shared(model, ids, group, [sequences[config] for config in group])
        found |= {context.config: context for context in contexts}
    for config in separate:
        found[config] = _prefill_one(model, ids, config, sequences[config], config in evicting, question)
    return [found[config] for config in configs]


def _prefill_shared(model: Any, ids: Tensor, configs: Seq[Config], sequences: Seq[Sequence]) -> list[PrefilledContext]:
    began = now(model.device)
    for sequence in sequences:
        sequence.before_forward(ids)
    logits = prefill_shared(model, ids[None].to(execution_device(model)), [sequence.cache for sequence in sequences])
    for sequence in sequences:
        sequence.after_forward(ids, logits[None])
    seconds = now(model.device) - began
    return [
        _context(config, sequence, logits, seconds, len(configs), not sequence.config.method.retrieval)
        for config, sequence in zip(configs, sequences, strict=True)
    ]


def _prefill_one(
    model: Any, ids: Tensor, config: Config, sequence: Sequence, long: bool, question: str
) -> PrefilledContext:
    began = now(model.device)
    if question:
        sequence.set_question(question, len(ids))
    logits = sequence.prefill(ids)
    frozen = not (long or sequence.config.method.retrieval)
    return _context(config, sequence, logits, now(model.device) - began, 1, frozen)


def _context(config: Config, sequence: Sequence, logits: Tensor, *rest: Any) -> PrefilledContext:
    return PrefilledContext(config, sequence, sequence.cache.report(), logits, *rest)


def _sequence(model: Any, tokenizer: Any, config: Config, method: Method, long: bool) -> Sequence:
    """long: the answer has to stay within the budget, too"""
    own = method.retrieval or (long and (method.scorer is None or method.schedule.every is not None))
    options = {"schedule": None if own else "buffer" if long else "prompt"}
    return SequenceConfig(model, tokenizer, *parse_budget(method, config[1]), cache_options=options).new_sequence()
