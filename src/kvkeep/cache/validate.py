"""Could this have been a cache? Asked of a file before anything in it is used: sums that vouch can be made up too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.kernels.torch.quantization import GROUP, Packed
from kvkeep.model.hf_cache import key_shape, key_widths

if TYPE_CHECKING:
    from kvkeep.cache.cache import Cache

SHAPE = ("rows", "kv_heads", "starts", "lengths", "room")
PARTS = ("keys", "values", "positions", "places", "notes")
CODES = tuple(each.name for each in fields(Packed) if each.name != "bits")
TAILS = ("tail_keys", "tail_values")
HALF = (torch.float16, torch.bfloat16)  # what autocast makes of a model's numbers

Tensors = Mapping[str, Tensor]


def check(cache: Cache, tensors: Tensors, facts: Mapping[str, Any]) -> None:
    """ValueError, saying what cannot be. cache: a fresh one of the model, method and budget that are described"""
    _need(facts["schedule"] is None or type(facts["schedule"]) is int, f"schedule {facts['schedule']!r}")
    _check_counts(facts, tensors.get("shown"))
    layers, coded = facts["layers"], facts.get("coded", {})
    _need(set(layers) == {str(i) for i in cache.owned}, f"layers {', '.join(layers)[:80]}")
    coming = {str(i) for i in cache.owned} if cache.bits and facts["seen"] else set()
    _need(isinstance(coded, dict) and set(coded) == coming, "codes")
    used, made = {"shown"} & set(tensors), key_widths(cache.model)
    for i in cache.owned:
        used |= _check_layer(cache, i, layers[str(i)], coded.get(str(i)), tensors, facts["seen"], made.get(i))
    used |= _check_stock(cache, facts, tensors, made)
    used |= _check_voters(cache, facts, tensors)
    _need(used == set(tensors), f"tensors {', '.join(sorted(used ^ set(tensors)))[:80]}")


def check_context(context: Mapping[str, Any], seen: Sequence[int]) -> None:
    """ValueError, saying what cannot be. context: a text, its ids and the questions that decided what was kept"""
    _need(isinstance(context["text"], str), f"text {str(context['text'])[:80]!r}")
    _need(len(seen) == 1 and _numbers(context["ids"], seen[0]), f"ids of a text of {seen} tokens")
    _need(isinstance(context["known"], list) and all(isinstance(each, str) for each in context["known"]), "questions")


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what}: cannot be")


def _numbers(values: Any, count: int, least: int = 0) -> bool:
    """So many whole numbers, none too small."""
    return isinstance(values, list) and len(values) == count and all(type(n) is int and n >= least for n in values)


def _check_counts(facts: Mapping[str, Any], shown: Tensor | None) -> None:
    """Tokens seen and held by each row, and columns, which only padding can make more."""
    seen, held, columns = facts["seen"], facts["held"], facts["columns"]
    _need(_numbers([facts["peak"], columns], 2), f"peak {facts['peak']!r}, columns {columns!r}")
    _need(isinstance(seen, list) and _numbers(seen, len(seen)) and _numbers(held, len(seen)), "seen and held")
    _need(all(h <= s <= columns for h, s in zip(held, seen, strict=True)), f"held {held}, seen {seen} of {columns}")
    prompt = facts["prompt"]
    _need(_numbers(prompt, len(seen)) and all(p <= s for p, s in zip(prompt, seen, strict=True)), f"prompts {prompt!r}")
    if shown is not None:
        _need(shown.dtype == torch.bool and shown.ndim == 2 and len(shown) == len(seen), "a mask of this shape")
    unpadded = columns if shown is None else columns - shown.shape[1]
    _need(unpadded >= 0 and all(s >= unpadded for s in seen), f"{columns} columns for {seen} tokens")
    _need(bool(seen) or not columns, f"{columns} columns without rows")


def _check_layer(
    cache: Cache,
    i: int,
    shape: dict[str, Any],
    coded: dict[str, Any] | None,
    tensors: Tensors,
    seen: list[int],
    made: tuple[int, int] | None,
) -> set[str]:
    """made: numbers the model's code says a token's keys and values have. -> the names of its tensors"""
    _need(set(shape) == set(SHAPE), f"layer {i} with {', '.join(shape)[:80]}")
    rows, kv_heads, starts, lengths, room = (shape[name] for name in SHAPE)
    _need(_numbers([rows, kv_heads], 2) and rows == len(seen) and bool(kv_heads) == bool(rows), f"rows of layer {i}")
    segments = rows * kv_heads
    _need(segments < 2**31 and all(_numbers(each, segments) for each in (starts, lengths, room)), f"sizes of layer {i}")
    *firsts, slots = accumulate(room, initial=0)
    _need(starts == firsts and all(n <= most for n, most in zip(lengths, room, strict=True)), f"segments of layer {i}")
    if not rows:
        return set()
    method, dim, wide = cache.method, *_widths(cache, i, kv_heads, tensors, made)
    number = _dtype(cache, tensors[f"layer.{i}.{'tail_keys' if cache.bits else 'keys'}"])
    form = {"positions": (torch.int32, slots)} | ({"places": (None, slots)} if method.place else {})
    form |= {"notes": (torch.float32, slots, method.memory.width)} if method.memory else {}
    form |= _coded_form(rows, lengths, coded, cache.bits, number, dim, wide) if cache.bits else (
        {"keys": (number, slots, dim), "values": (number, slots, wide)})  # fmt: skip
    for name, (dtype, *sizes) in form.items():
        _check_tensor(f"layer.{i}.{name}", tensors, dtype, sizes)
    _check_places(i, tensors, starts, lengths, [n for n in seen for _ in range(kv_heads)])
    return {f"layer.{i}.{name}" for name in form}


def _widths(cache: Cache, i: int, kv_heads: int, tensors: Tensors, made: tuple[int, int] | None) -> tuple[int, int]:
    """Numbers of a key and of a value of one head: those of the tensors, if the model can have made them."""
    names = TAILS if cache.bits else ("keys", "values")
    dim, wide = (tensors[f"layer.{i}.{name}"].shape[-1] for name in names)
    heads, size = key_shape(cache.model)
    made = made or (heads * size, heads * size)
    _need((kv_heads * dim, kv_heads * wide) == made, f"{kv_heads} heads of {dim} and {wide} numbers in layer {i}")
    _need(made[0] != heads * size or kv_heads == heads, f"{kv_heads} heads in layer {i}")
    return dim, wide


def _dtype(cache: Cache, tensor: Tensor) -> torch.dtype:
    _need(tensor.dtype in (cache.model.dtype, *HALF), f"keys of {tensor.dtype}")
    return tensor.dtype


def _coded_form(
    rows: int, lengths: list[int], coded: Any, bits: int, number: torch.dtype, dim: int, wide: int
) -> dict[str, tuple]:
    """What kernels/torch/quantization.py wants, for so many groups."""
    _need(set(coded) == {"firsts", "room"}, "codes")
    firsts, room = coded["firsts"], coded["room"]
    _need(_numbers(firsts, len(lengths)) and _numbers(room, len(lengths)), "groups of codes")
    *starts, groups = accumulate(room, initial=0)
    _need(firsts == starts and all(n // GROUP <= most for n, most in zip(lengths, room, strict=True)), "groups")
    groups, segments = max(1, groups), (rows, len(lengths) // rows, GROUP)
    slots = groups * GROUP
    steps = {f"key_{name}": (number, groups, dim) for name in ("steps", "zeros")}
    steps |= {f"value_{name}": (torch.float32, slots) for name in ("steps", "zeros")}
    codes = {f"{name}_codes": (torch.uint8, slots, n * bits // 8) for name, n in (("key", dim), ("value", wide))}
    return steps | codes | {"tail_keys": (number, *segments, dim), "tail_values": (number, *segments, wide)}


def _check_tensor(name: str, tensors: Tensors, dtype: torch.dtype | None, sizes: Sequence[int]) -> None:
    """dtype None: whole numbers"""
    tensor = tensors[name]
    fits = tensor.dtype in (torch.int32, torch.int64) if dtype is None else tensor.dtype == dtype
    _need(fits and list(tensor.shape) == list(sizes), f"{name} of {tensor.dtype} and shape {list(tensor.shape)}")


def _check_places(i: int, tensors: Tensors, starts: list[int], lengths: list[int], seen: list[int]) -> None:
    """Kept tokens stood one behind the other in a text that was read; their keys are numbers."""
    positions, keys = tensors[f"layer.{i}.positions"], tensors.get(f"layer.{i}.keys")
    for start, n, most in zip(starts, lengths, seen, strict=True):
        mine = positions[start : start + n]
        ascending = bool((mine[1:] > mine[:-1]).all())
        _need(not n or (ascending and mine[0] >= 0 and mine[-1] < most), f"positions of layer {i}")
        _need(keys is None or not keys[start : start + n].isnan().any(), f"keys of layer {i} that are not numbers")


def _check_stock(
    cache: Cache, facts: Mapping[str, Any], tensors: Tensors, made: Mapping[int, tuple[int, int]]
) -> set[str]:
    """Layers left to transformers, each of which has read every column."""
    rows, columns, stock = len(facts["seen"]), facts["columns"], facts["stock"]
    left = [str(i) for i in range(len(cache.layers)) if i not in cache.owned]
    _need(set(stock) == set(left if rows else ()), f"stock layers {', '.join(stock)[:80]}")
    for i, length in stock.items():
        keys, values = (tensors[f"stock.{i}.{name}"] for name in ("keys", "values"))
        _need(type(length) is int and length == columns, f"length {length!r} of layer {i}")
        _need(keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3], f"shapes of layer {i}")
        _need(len(keys) == rows and 0 < keys.shape[2] <= columns, f"tokens of layer {i}")
        widths = keys[0, :, 0].numel(), values[0, :, 0].numel()
        _need(widths == made.get(int(i), widths), f"heads of layer {i}")
        _need(_dtype(cache, keys) == values.dtype, f"dtypes of layer {i}")
    return {f"stock.{i}.{name}" for i in stock for name in ("keys", "values")}


def _check_voters(cache: Cache, facts: Mapping[str, Any], tensors: Tensors) -> set[str]:
    """Queries that will judge, of rows there are, no more than the method looks at. [heads, w, dim]"""
    known = {f"voters.{i}.{row}": i for i in cache.owned for row in range(len(facts["seen"]))}
    found = {name: i for name, i in known.items() if name in tensors}
    rows = {name.rpartition(".")[2] for name in found}
    _need(all(f"voters.{i}.{row}" in found for i in cache.owned for row in rows), "voters of some layers only")
    for name, i in found.items():
        queries, keys = tensors[name], tensors[f"layer.{i}.{'tail_keys' if cache.bits else 'keys'}"]
        shape, kv_heads = queries.shape, facts["layers"][str(i)]["kv_heads"]
        _need(queries.ndim == 3 and shape[-1] == keys.shape[-1] and shape[0] % kv_heads == 0, f"{name} of {shape}")
        _need(0 < shape[1] <= cache.observer.wanted and queries.dtype == keys.dtype, f"{name} of {shape}")
    return set(found)
