"""One prefill for many caches: a prompt's forward pass is the same whatever is evicted after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.cache.passes import run_passes
from kvkeep.errors import CacheMisuse
from kvkeep.model.chunked_mlp import long_prompt
from kvkeep.model.fused import fused_ops
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter


class SharedPrefillCache(HFCacheAdapter):
    """Passes every layer's queries, keys and values to several caches, each with its own method and budget."""

    seen = 0

    def __init__(self, model: Any, caches: Sequence[Cache]) -> None:
        super().__init__(model)
        self.caches = caches
        for cache in caches[1:]:  # the model is checked once for all
            cache.attention_check.checked = caches[0].attention_check.checked

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


def prefill_shared(model: Any, ids: Tensor, caches: Sequence[Cache]) -> Tensor:
    """One forward pass for all of them. ids [1, n] -> logits after the last token [vocabulary]"""
    shared = SharedPrefillCache(model, caches)
    with torch.inference_mode(), fused_ops(model, 1), long_prompt(model, ids.shape[1]):
        logits = model(ids, past_key_values=shared, logits_to_keep=1).logits[0, -1]
    for cache in caches:
        cache.copy_hf_layers(shared)
    return logits
