"""Caches to and from disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvkeep.cache.validate import CODES, PARTS, SHAPE, TAILS, check, check_context
from kvkeep.compress.parse import parse
from kvkeep.compress.schedule import Schedule
from kvkeep.errors import BadCacheFile, CacheMisuse, KvkeepError
from kvkeep.kernels.torch.quantization import Packed
from kvkeep.model.hf_cache import OwnedLayer, devices, fingerprint
from kvkeep.model.hf_layers import restore, tensors_of
from kvkeep.storage import checkpoint
from kvkeep.storage.quantized import Coded
from kvkeep.types import Tokens

if TYPE_CHECKING:
    from kvkeep.cache.cache import Cache


def save(cache: Cache, path: str | Path, **more: Any) -> None:
    """more: facts that are written beside the cache's own"""
    if cache.underway is not None:
        raise CacheMisuse("a forward pass on this cache was cut short; reset() it, or go on with it, before saving.")
    if cache.recaller:
        raise CacheMisuse(f"a cache of '{cache.method.name}' cannot be saved yet: what it put away is not written.")
    named = replace(parse(cache.method.name, **cache.method.parameters), schedule=cache.method.schedule)
    if named != cache.method:
        raise CacheMisuse(
            f"'{cache.method.name}' is not a named method, so a file could not say how to go on; use a named one."
        )
    cache.observer.gather()
    for layer in cache.store.values():
        layer.settle()
    tensors = {
        f"layer.{i}.{name}": part
        for i, layer in cache.store.items() if layer
        for name, part in zip(PARTS, layer.flat.parts, strict=True) if part is not None
    }  # fmt: skip
    coded = {i: layer.coded for i, layer in cache.store.items() if layer.coded}
    tensors |= {f"layer.{i}.{name}": getattr(each.packed, name) for i, each in coded.items() for name in CODES}
    tensors |= {f"layer.{i}.{name}": getattr(each, name) for i, each in coded.items() for name in TAILS}
    facts = {
        "model": fingerprint(cache.model),
        "model_class": cache.name,
        "dtype": str(cache.model.dtype),
        "method": cache.method.name,
        "parameters": dict(cache.method.parameters),
        "budget": cache.budget,
        "seen": cache.arrivals.seen,
        "held": cache.arrivals.held,
        "columns": cache.arrivals.columns,
        "prompt": cache.arrivals.prompt,
        "peak": cache.peak,
        "schedule": cache.method.schedule.every,
        "storage": cache.storage,
        "coded": {str(i): {name: getattr(each, name) for name in ("firsts", "room")} for i, each in coded.items()},
        "layers": {str(i): _shape(layer) for i, layer in cache.store.items()},
        "stock": _stock(cache, tensors),
        **more,
    }
    if cache.arrivals.shown is not None:
        tensors["shown"] = cache.arrivals.shown
    tensors |= {f"voters.{i}.{row}": queries for (i, row), queries in cache.observer.voters.items()}
    checkpoint.write(path, tensors, facts)


def _shape(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in SHAPE}


def _stock(cache: Cache, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Put the sliding-window layers' tensors beside ours. -> their lengths"""
    lengths = {}
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, OwnedLayer) and (held := tensors_of(i, layer)):
            tensors |= {f"stock.{i}.{name}": t for name, t in held.items()}
            lengths[str(i)] = layer.get_seq_length()
    return lengths


def load(kind: type[Cache], path: str | Path, model: Any) -> Cache:
    return _load(kind, path, model)[0]


def load_context(kind: type[Cache], path: str | Path, model: Any) -> tuple[Cache, dict[str, Any]]:
    """A cache of a text, and the text."""
    cache, facts = _load(kind, path, model)
    if "context" not in facts:
        raise BadCacheFile(f"{path} is a cache without its text; load it with Cache.load(path, model).")
    try:
        check_context(facts["context"], facts["seen"])
    except (AttributeError, LookupError, TypeError, ValueError) as e:
        raise BadCacheFile(f"{path} does not describe a text that was read ({e}); save it again.") from e
    return cache, facts["context"]


def _load(kind: type[Cache], path: str | Path, model: Any) -> tuple[Cache, dict[str, Any]]:
    tensors, facts = checkpoint.read(path)
    if facts.get("dtype") != str(model.dtype):
        raise BadCacheFile(
            f"{path} was saved with {facts.get('dtype')}, this model has {model.dtype}; load the model like that."
        )
    if facts.get("model") != fingerprint(model):
        raise BadCacheFile(f"{path} was saved with another model ({facts.get('model_class')}); load it with that one.")
    try:
        method = replace(parse(facts["method"], **facts["parameters"]), schedule=Schedule(facts["schedule"]))
        cache = kind(model, method, facts["budget"], storage=facts.get("storage"))
        check(cache, tensors, facts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, KvkeepError) as e:
        raise BadCacheFile(f"{path} does not describe a cache this version understands ({e}); save it again.") from e
    _restore(cache, tensors, facts)
    return cache, facts


def _restore(cache: Cache, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    where = devices(cache.model)
    tensors = {name: t.to(where.get(_layer_of(name), cache.model.device)) for name, t in tensors.items()}
    cache.arrivals.seen, cache.arrivals.held = facts["seen"], facts["held"]
    cache.arrivals.columns, cache.peak = facts["columns"], facts["peak"]
    cache.arrivals.shown, cache.arrivals.prompt = tensors.get("shown"), facts["prompt"]
    for i, layer in cache.store.items():
        for name in SHAPE:
            setattr(layer, name, facts["layers"][str(i)][name])
        if layer.lengths:
            layer.flat = Tokens(*(tensors.get(f"layer.{i}.{part}") for part in PARTS))
            layer.mark_ends()
        if layer.lengths and layer.bits:
            codes, tails = ([tensors[f"layer.{i}.{name}"] for name in names] for names in (CODES, TAILS))
            layer.coded = Coded(Packed(*codes, layer.bits), *tails, **facts["coded"][str(i)], lengths=layer.lengths)
    for i, length in facts["stock"].items():
        restore(cache.layers[int(i)], tensors[f"stock.{i}.keys"], tensors[f"stock.{i}.values"], length)
    cache.observer.voters = {
        (int(i), int(row)): tensors[name]
        for name in tensors
        if name.startswith("voters.")
        for _, i, row in [name.split(".")]
    }


def _layer_of(name: str) -> int | None:
    """The layer a saved tensor belongs to: its name is kind.layer.part."""
    parts = name.split(".")
    return int(parts[1]) if len(parts) > 1 else None
