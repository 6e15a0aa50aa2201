"""Caches saved to and loaded from disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvkeep.cache.cache_state import CacheState
from kvkeep.cache.validate import CODES, PARTS, SHAPE, TAILS, check, check_context
from kvkeep.compress.method import Method, Schedule
from kvkeep.compress.parse import parse
from kvkeep.errors import BadCacheFile, CacheMisuse, KvkeepError, UnknownName
from kvkeep.kernels.torch.quantization import QuantizedKV
from kvkeep.model.hf_cache import (
    CompressedLayer,
    check_supported,
    fingerprint,
    key_shape,
    kv_widths,
    layer_devices,
    layer_tensors,
    restore,
    uncompiled,
)
from kvkeep.storage import checkpoint
from kvkeep.storage.history import History
from kvkeep.storage.quantized import QuantizedLayer
from kvkeep.types import Tokens

C = TypeVar("C", bound=CacheState)
WHOLE = ("keys", "values")  # of a history's layer
NOTHING_SEEN = {"seen": [], "kept": [], "prompt": [], "padded_length": 0}  # of a cache that goes on after a history


def save(cache: CacheState, path: str | Path) -> None:
    checkpoint.write(path, *describe(cache))


def can_save(cache: CacheState) -> bool:
    return not (cache.method.retrieval or cache.shards) and is_named(cache.method)


def describe(cache: CacheState, **more: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a cache, and facts about it. more: facts beside the cache's own"""
    if cache.in_forward:
        raise CacheMisuse("a forward pass on this cache was cut short; reset() it, or go on with it, before saving.")
    if cache.method.retrieval:
        raise CacheMisuse(f"a cache of '{cache.method.name}' cannot be saved yet: offloaded tokens are not written.")
    if not is_named(cache.method):
        raise CacheMisuse(
            f"'{cache.method.name}' is not a named method, so a file could not say how to go on; use a named one, or "
            "name yours: kvkeep.register_method. Its parts must be equal whenever it is made: no function inside a "
            "function."
        )
    tensors = {
        f"layer.{i}.{name}": part
        for i, layer in cache.backend.store.items() if layer
        for name, part in layer.flat.parts.items() if 0 not in part.shape[1:]  # codes have no other keys and values
    }  # fmt: skip
    coded = {i: layer.quantized for i, layer in cache.backend.store.items() if layer.quantized}
    tensors |= {f"layer.{i}.{name}": getattr(each.kv, name) for i, each in coded.items() for name in CODES}
    tensors |= {f"layer.{i}.{name}": getattr(each, name) for i, each in coded.items() for name in TAILS}
    facts = {
        "model": fingerprint(cache.model),
        "model_class": cache.name,
        "dtype": str(cache.model.dtype),
        "method": cache.method.name,
        "parameters": dict(cache.method.parameters),
        "budget": cache.budget,
        **{name: getattr(cache.tracker, name) for name in NOTHING_SEEN},
        "peak_bytes": cache.backend.peak_bytes,
        "schedule": cache.method.schedule.every,
        "storage": cache.storage,
        "quantized": {str(i): {name: getattr(each, name) for name in ("firsts", "room")} for i, each in coded.items()},
        "layers": {str(i): {name: getattr(layer, name) for name in SHAPE} for i, layer in cache.backend.store.items()},
        "hf_layers": _hf_layers(cache, tensors),
        **more,
    }
    if cache.tracker.attention_mask is not None:
        tensors["attention_mask"] = cache.tracker.attention_mask
    tensors |= {f"queries.{i}.{row}": queries for (i, row), queries in cache.backend.query_buffer.queries.items()}
    return tensors, facts


def _hf_layers(cache: CacheState, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Add the tensors of sliding-window layers. -> their lengths"""
    lengths = {}
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, CompressedLayer) and (own := layer_tensors(i, layer)):
            tensors |= {f"hf_layer.{i}.{name}": t for name, t in own.items()}
            lengths[str(i)] = layer.get_seq_length()
    return lengths


def is_named(method: Method) -> bool:
    """Whether its name and parameters make it again."""
    try:
        return _alike(replace(parse(method.name, **method.parameters), schedule=method.schedule), method)
    except UnknownName:
        return False


def _alike(one: Any, other: Any) -> bool:
    """Equal; parts whose class does not say when two are equal, if all they hold is."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.equal(other)
    says_nothing = type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__") and not isinstance(one, FunctionType)
    if type(one) is not type(other) or not (is_dataclass(one) or says_nothing):
        return one == other
    held, other_held = vars(one), vars(other)
    return held.keys() == other_held.keys() and all(_alike(held[name], other_held[name]) for name in held)


def load(kind: Callable[..., C], path: str | Path, model: Any) -> C:
    return restored(kind, path, model, *checkpoint.read(path))


def save_context(cache: CacheState, history: History | None, path: str | Path, context: dict[str, Any]) -> None:
    """Save the cache of a context, or an empty one and the history that it goes on after."""
    tensors, facts = describe(cache, context=context)
    for i in cache.compressed_layers if history else ():
        assert history and (pair := history.read(i))
        tensors |= {f"whole.{i}.{name}": part for name, part in zip(WHOLE, pair, strict=True)}
    checkpoint.write(path, tensors, facts | {"whole": history is not None})


def load_context(
    kind: Callable[..., C], path: str | Path, model: Any, empty: Callable[[int], History]
) -> tuple[C, dict[str, Any], History | None]:
    """A cache of a context, the context, and the history that the cache goes on after; None: it has a cache's tokens.

    empty: a history for so many tokens
    """
    tensors, facts = checkpoint.read(path)
    whole = {name: tensors.pop(name) for name in [*tensors] if name.startswith("whole.")}
    cache = restored(kind, path, model, tensors, facts | NOTHING_SEEN if facts.get("whole") else facts)
    if "context" not in facts:
        raise BadCacheFile(f"{path} is a cache without its text; load it with Cache.load(path, model).")
    try:
        check_context(facts["context"], facts["seen"])
        history = _history(cache, whole, facts["seen"][0], empty) if facts.get("whole") else None
    except (AttributeError, LookupError, TypeError, ValueError) as e:
        raise BadCacheFile(f"{path} does not describe a context ({e}); save it again.") from e
    return cache, facts["context"], history


def _history(cache: CacheState, tensors: dict[str, Tensor], tokens: int, empty: Callable[[int], History]) -> History:
    """Raise ValueError for tensors that no text of so many tokens has."""
    history, kv_heads, widths = empty(tokens), key_shape(cache.model)[0], kv_widths(cache.model)
    devices = layer_devices(cache.model)
    for i in cache.compressed_layers:
        keys, values = (tensors.pop(f"whole.{i}.{name}") for name in WHOLE)
        sizes = tuple(kv_heads * part.shape[-1] for part in (keys, values))  # of a token, in all heads
        fits = sizes == widths.get(i, sizes) and keys.shape[:-1] == values.shape[:-1] == (kv_heads, tokens)
        if not (fits and keys.dtype == values.dtype and keys.is_floating_point()):
            raise ValueError(f"keys and values of layer {i}")
        device = devices.get(i, cache.model.device)
        history.append(i, keys.to(device), values.to(device))
    if tensors:
        raise ValueError("tensors")
    history.commit()
    return history


def restored(kind: Callable[..., C], path: str | Path, model: Any, tensors: dict[str, Tensor], facts: Any) -> C:
    """What was read from a path, as a cache on the model's devices."""
    check_supported(uncompiled(model))
    if facts.get("dtype") != str(model.dtype):
        raise BadCacheFile(
            f"{path} was saved with {facts.get('dtype')}, this model has {model.dtype}; load the model like that."
        )
    if facts.get("model") != fingerprint(model):
        raise BadCacheFile(f"{path} was saved with another model ({facts.get('model_class')}); load it with that one.")
    try:
        method = replace(_parse(path, facts), schedule=Schedule(facts["schedule"]))
        cache = kind(model, method, facts["budget"], storage=facts.get("storage"))
        check(cache, tensors, facts)
    except BadCacheFile:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, KvkeepError) as e:
        raise BadCacheFile(f"{path} does not describe a cache this version understands ({e}); save it again.") from e
    _restore(cache, tensors, facts)
    return cache


def _parse(path: str | Path, facts: dict[str, Any]) -> Method:
    try:
        return parse(facts["method"], **facts["parameters"])
    except UnknownName as e:
        name = re.split("[:+]", facts["method"])[0]
        raise BadCacheFile(
            f"{path} is a cache of '{facts['method']}', but {e} If '{name}' is a method of your own or of another "
            f"package, import that package, or kvkeep.register_method('{name}') it, and load again."
        ) from e


def _restore(cache: CacheState, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    devices = layer_devices(cache.model)
    tensors = {name: t.to(devices.get(_layer_of(name), cache.model.device)) for name, t in tensors.items()}
    for name in NOTHING_SEEN:
        setattr(cache.tracker, name, facts[name])
    cache.tracker.attention_mask, cache.backend.peak_bytes = tensors.get("attention_mask"), facts["peak_bytes"]
    for i, layer in cache.backend.store.items():
        for name in SHAPE:
            setattr(layer, name, facts["layers"][str(i)][name])
        if not layer:
            continue
        prefix = f"layer.{i}."
        mine = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        if layer.bits:
            kv = QuantizedKV(**{name: mine[name] for name in CODES}, bits=layer.bits)
            groups, tails = facts["quantized"][str(i)], (mine["tail_keys"], mine["tail_values"])
            layer.quantized = QuantizedLayer(kv, *tails, groups["firsts"], groups["room"], layer.lengths)
            mine["keys"] = mine["values"] = torch.empty(sum(layer.room), 0)
        layer.flat = Tokens(**{name: mine[name] for name in PARTS if name in mine})
        layer.place()
    for i, length in facts["hf_layers"].items():
        restore(cache.layers[int(i)], tensors[f"hf_layer.{i}.keys"], tensors[f"hf_layer.{i}.values"], length)
    cache.backend.query_buffer.queries = {
        (int(i), int(row)): tensors[name]
        for name in tensors
        if name.startswith("queries.")
        for _, i, row in [name.split(".")]
    }


def _layer_of(name: str) -> int:
    """The layer a saved tensor belongs to: its name is kind.layer.part; -1: none."""
    parts = name.split(".")
    return int(parts[1]) if len(parts) > 1 else -1
