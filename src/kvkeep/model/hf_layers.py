"""State of the layers we leave to transformers: copied with a cache, and saved with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer, StaticCache

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


def _noticed(name: str) -> property:
    def read(layer: Watched) -> Any:
        layer.ran = True
        return layer.__dict__[name]

    return property(read, lambda layer, value: layer.__dict__.update({name: value}))


class Watched(LinearAttentionLayer):
    """A linear layer that notices when it is used, even by kernels that write in place: its states do not tell."""

    ran = True  # since it was last set to False
    conv_states, recurrent_states = _noticed("conv_states"), _noticed("recurrent_states")

    @classmethod
    def like(cls, layer: LinearAttentionLayer) -> Watched:
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__)
        return made


def has_read(layer: Any, seen: int, ended: bool) -> bool:
    """Whether a layer has read so many tokens, neither more nor less. ended: the last pass went through our layers"""
    if hasattr(layer, "get_seq_length"):
        return layer.get_seq_length() == seen
    return ended and getattr(layer, "ran", True)  # a linear layer cannot tell how far a pass that did not end came
