"""Prefill one context for many configs, then ask questions about it.

Methods that leave the attention of prefill as the model computes it share one forward pass over the context. Every
question is asked on forks. Of eviction methods nothing of a question or an answer is evicted or counted; retrieval
methods retrieve for both, and answers of configs in `evicting` have to stay within the budget.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.cache.passes import run_passes
from kvkeep.cache.report import Report
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse_budget
from kvkeep.engine.progress import now
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import CacheMisuse
from kvkeep.model.chunked_mlp import long_prompt
from kvkeep.model.fused import fused_ops
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter, context_length, execution_device

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
    separate = [
        config
        for config, method in configs.items()
        if config in evicting or too_long or (method.retrieval and method.retrieval.window)
    ]
    together = [config for config in configs if config not in separate]
    groups = [together] if share and together else [[config] for config in together]
    found: dict[Config, PrefilledContext] = {}
    for group in [*groups, *([config] for config in separate)]:
        began = now(model.device)
        if group[0] in separate:
            sequence = sequences[group[0]]
            if question:
                sequence.set_question(question, len(ids))
            logits = sequence.prefill(ids)
        else:
            logits = _prefill_together(model, [sequences[config] for config in group], ids)
        seconds = now(model.device) - began
        for config in group:
            frozen = not (config in evicting or configs[config].retrieval)
            report = sequences[config].cache.report()
            found[config] = PrefilledContext(config, sequences[config], report, logits, seconds, len(group), frozen)
    return [found[config] for config in configs]


def _prefill_together(model: Any, sequences: Seq[Sequence], ids: Tensor) -> Tensor:
    for sequence in sequences:
        sequence.before_forward(ids)
    logits = prefill_shared(model, ids[None].to(execution_device(model)), [sequence.cache for sequence in sequences])
    for sequence in sequences:
        sequence.after_forward(ids, logits[None])
    return logits


def _sequence(model: Any, tokenizer: Any, config: Config, method: Method, long: bool) -> Sequence:
    """long: the answer has to stay within the budget, too"""
    own = method.retrieval or (long and (method.scorer is None or method.schedule.every is not None))
    options = {"schedule": None if own else "buffer" if long else "prompt"}
    return SequenceConfig(model, tokenizer, *parse_budget(method, config[1]), cache_options=options).new_sequence()


class SharedPrefillCache(HFCacheAdapter):
    """Passes every layer's queries, keys and values to several caches, each with its own method and budget."""

    seen = 0

    def __init__(self, model: Any, caches: Seq[Cache]) -> None:
        super().__init__(model)
        self.caches = caches
        for cache in caches[1:]:  # the model is checked once for all
            cache.attention_check.compared = caches[0].attention_check.compared

    def after_forward(self, ids: Tensor | None, positions: Tensor | None) -> None:
        for cache in self.caches:
            cache.note_text(ids, positions)
        run_passes(self.caches, known=[])  # a text is fed again once for all budgets of a method

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        shared = replace(call, hf_attention=once(call.hf_attention), is_sdpa=False, memo={})
        outputs = [cache.attend(index, shared) for cache in self.caches]
        if any(output is not shared.hf_attention() for output in outputs):
            raise CacheMisuse("a method that prefills in windows cannot share a prefill; give it its own.")
        return outputs[0]


def prefill_shared(model: Any, ids: Tensor, caches: Seq[Cache]) -> Tensor:
    """One forward pass for all of them. ids [1, n] -> logits after the last token [vocabulary]"""
    shared = SharedPrefillCache(model, caches)
    with torch.inference_mode(), fused_ops(model, 1), long_prompt(model, ids.shape[1]):
        logits = model(ids, past_key_values=shared, logits_to_keep=1).logits[0, -1]
    for cache in caches:
        cache.copy_hf_layers(shared)
    return logits
