"""One reading for many caches: the first pass over a prompt is the same whatever is dropped after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.errors import CacheMisuse
from kvkeep.model.hf_attention import Handover
from kvkeep.model.hf_cache import AdaptedCache


class Fan(AdaptedCache):
    """Hands every layer's queries, keys and values to several caches, each with its own method and budget."""

    seen = 0

    def __init__(self, model: Any, caches: Sequence[Cache]) -> None:
        super().__init__(model)
        self.caches = caches
        for cache in caches[1:]:  # what one finds true of the model is true for all
            cache.watch.checked = caches[0].watch.checked

    def attend(self, index: int, new: Handover) -> tuple[Tensor, Tensor | None]:
        shared = replace(new, stock=once(new.stock), plain=False, known={})
        outcomes = [cache.attend(index, shared) for cache in self.caches]
        if any(outcome is not shared.stock() for outcome in outcomes):
            raise CacheMisuse("a method that reads in windows cannot share a reading; give it its own.")
        return outcomes[0]


def read(model: Any, ids: Tensor, caches: Sequence[Cache]) -> Tensor:
    """One forward pass for all of them. ids [1, n] -> logits after the last token [vocabulary]"""
    fan = Fan(model, caches)
    with torch.inference_mode():
        logits = model(ids, past_key_values=fan, logits_to_keep=1).logits[0, -1]
    for cache in caches:
        cache.copy_stock(fan)
    return logits
