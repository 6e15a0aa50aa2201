"""State of the layers left to transformers: copied with a cache, and saved with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer, StaticCache

from kvkeep.errors import CacheMisuse


def dynamic_cache(model: Any) -> DynamicCache:
    """transformers' own cache, which keeps every token."""
    return DynamicCache(config=model.config)


def static_cache(model: Any, tokens: int) -> StaticCache:
    """transformers' cache of a fixed length."""
    return StaticCache(config=model.config, max_cache_len=tokens)


def layer_tensors(index: int, layer: Any) -> dict[str, Tensor]:
    """The tensors of a sliding-window layer, by name."""
    if not isinstance(layer, DynamicLayer):
        raise CacheMisuse(f"layer {index} is a {type(layer).__name__}, whose state cannot be saved yet.")
    return {name: getattr(layer, name) for name in ("keys", "values")} if layer.is_initialized else {}


def restore(layer: Any, keys: Tensor, values: Tensor, length: int) -> None:
    """Put a sliding-window layer back into the state it was saved in."""
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = length


def _tracked(name: str) -> property:
    def get(layer: UsageTrackedLayer) -> Any:
        layer.used = True
        return layer.__dict__[name]

    return property(get, lambda layer, value: layer.__dict__.update({name: value}))


class UsageTrackedLayer(LinearAttentionLayer):
    """A linear layer that records being used, even by kernels that write in place: its states do not tell."""

    used = True  # since it was last set to False
    conv_states, recurrent_states = _tracked("conv_states"), _tracked("recurrent_states")

    @classmethod
    def like(cls, layer: LinearAttentionLayer) -> UsageTrackedLayer:
        tracked = cls.__new__(cls)
        tracked.__dict__.update(layer.__dict__)
        return tracked


def has_seen(layer: Any, seen: int, completed: bool) -> bool:
    """Whether a layer has seen exactly so many tokens. completed: the last forward pass was committed"""
    if hasattr(layer, "get_seq_length"):
        return layer.get_seq_length() == seen
    return completed and getattr(layer, "used", True)  # a linear layer cannot tell how far a cut short pass came
