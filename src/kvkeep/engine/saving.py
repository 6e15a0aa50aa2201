"""Caches to and from disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvkeep.cache import file
from kvkeep.compress.method import parse
from kvkeep.errors import BadCacheFile, CacheMisuse, KvkeepError
from kvkeep.model.adapter import OwnedLayer, fingerprint

if TYPE_CHECKING:
    from kvkeep.engine.session import Cache

PARTS = ("keys", "values", "positions")


def save(cache: Cache, path: str | Path) -> None:
    if cache.broken:
        raise CacheMisuse("this cache is unusable since a forward pass failed halfway, so it cannot be saved.")
    if parse(cache.method.name, **cache.method.parameters) != cache.method:
        raise CacheMisuse(f"'{cache.method.name}' is not a named method, so a file could not say how to go on; use a named one.")
    tensors = {f"layer.{i}.{part}": getattr(layer, part) for i, layer in cache.store.items() if layer for part in PARTS}
    facts = {
        "model": fingerprint(cache.model),
        "model_class": type(cache.model).__name__,
        "method": cache.method.name,
        "parameters": dict(cache.method.parameters),
        "budget": cache.budget,
        "seen": cache.arrivals.seen,
        "columns": cache.arrivals.columns,
        "layers": {str(i): _shape(layer) for i, layer in cache.store.items()},
        "stock": _stock(cache, tensors),
    }
    if cache.arrivals.shown is not None:
        tensors["shown"] = cache.arrivals.shown
    tensors |= {f"voters.{i}.{row}": queries for (i, row), queries in cache.voters.items()}
    file.write(path, tensors, facts)


def _shape(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in ("rows", "kv_heads", "starts", "lengths", "room")}


def _stock(cache: Cache, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Put the sliding-window layers' tensors beside ours. -> their lengths"""
    lengths = {}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, OwnedLayer) or not layer.is_initialized:
            continue
        if not isinstance(layer, DynamicLayer):
            raise CacheMisuse(f"layer {i} is a {type(layer).__name__}, whose state cannot be saved yet.")
        tensors |= {f"stock.{i}.keys": layer.keys, f"stock.{i}.values": layer.values}
        lengths[str(i)] = layer.get_seq_length()
    return lengths


def load(kind: type[Cache], path: str | Path, model: PreTrainedModel) -> Cache:
    tensors, facts = file.read(path)
    if facts.get("model") != fingerprint(model):
        raise BadCacheFile(f"{path} was saved with another model ({facts.get('model_class')}); load it with that one.")
    try:
        cache = kind(model, facts["method"], facts["budget"], **facts["parameters"])
        _restore(cache, tensors, facts)
    except (KeyError, TypeError, KvkeepError) as e:
        raise BadCacheFile(f"{path} does not describe a cache this version understands ({e}); save it again.") from e
    return cache


def _restore(cache: Cache, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    device = cache.model.device
    tensors = {name: t.to(device) for name, t in tensors.items()}
    cache.arrivals.seen, cache.arrivals.columns = facts["seen"], facts["columns"]
    cache.arrivals.shown = tensors.get("shown")
    for i, layer in cache.store.items():
        face = cache.layers[i]
        face.seen, face.is_initialized = facts["columns"], facts["columns"] > 0
        for name, value in facts["layers"][str(i)].items():
            setattr(layer, name, value)
        if layer:
            layer.keys, layer.values, layer.positions = (tensors[f"layer.{i}.{part}"] for part in PARTS)
    for i, length in facts["stock"].items():
        layer = cache.layers[int(i)]
        layer.lazy_initialization(tensors[f"stock.{i}.keys"], tensors[f"stock.{i}.values"])
        layer.keys, layer.values = tensors[f"stock.{i}.keys"], tensors[f"stock.{i}.values"]
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
    cache.voters = {(int(i), int(row)): tensors[name] for name in tensors if name.startswith("voters.") for _, i, row in [name.split(".")]}



