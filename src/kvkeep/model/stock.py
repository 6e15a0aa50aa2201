"""State of the layers we leave to transformers: copied with a cache, and saved with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache

from kvkeep.errors import CacheMisuse


def stock_cache(model: Any) -> DynamicCache:
    """transformers' own cache, which keeps everything."""
    return DynamicCache(config=model.config)


def static_cache(model: Any, tokens: int) -> StaticCache:
    """transformers' cache of a fixed size."""
    return StaticCache(config=model.config, max_cache_len=tokens)


def tensors_of(index: int, layer: Any) -> dict[str, Tensor]:
    """What a sliding-window layer holds, by name."""
    if not isinstance(layer, DynamicLayer):
        raise CacheMisuse(f"layer {index} is a {type(layer).__name__}, whose state cannot be saved yet.")
    return {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}


def restore(layer: Any, keys: Tensor, values: Tensor, length: int) -> None:
    """Put a sliding-window layer back into the state it was saved in."""
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = length


def has_run(layer: Any, seen: int) -> bool:
    """Whether a layer has read more, or less, than the cache as a whole."""
    return (
        bool(getattr(layer, "is_initialized", False))
        and hasattr(layer, "get_seq_length")
        and layer.get_seq_length() != seen
    )
