"""Validates a saved cache before any of it is used: a matching checksum does not mean that a cache wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache_state import CacheState
from kvkeep.kernels.torch.quantization import GROUP_SIZE, QuantizedKV
from kvkeep.model.hf_cache import key_shape, kv_widths

SHAPE = ("rows", "kv_heads", "starts", "lengths", "room")
PARTS = ("keys", "values", "token_positions", "rope_positions", "token_state")
CODES = tuple(each.name for each in fields(QuantizedKV) if each.name != "bits")
TAILS = ("tail_keys", "tail_values")
HALF = (torch.float16, torch.bfloat16)  # dtypes that autocast may give keys

Tensors = Mapping[str, Tensor]


def check(cache: CacheState, tensors: Tensors, facts: Mapping[str, Any]) -> None:
    """Raise ValueError for what no cache can hold. cache: an empty one of the saved model, method and budget"""
    _require(facts["schedule"] is None or type(facts["schedule"]) is int, f"schedule {facts['schedule']!r}")
    _check_counts(facts, tensors.get("attention_mask"))
    layers, quantized = facts["layers"], facts.get("quantized", {})
    compressed = {str(i) for i in cache.compressed_layers}
    _require(set(layers) == compressed, f"layers {', '.join(layers)[:80]}")
    expected = compressed if cache.backend.bits and facts["seen"] else set()
    _require(isinstance(quantized, dict) and set(quantized) == expected, "codes")
    used, widths = {"attention_mask"} & set(tensors), kv_widths(cache.model)
    for i in cache.compressed_layers:
        used |= _check_layer(cache, i, facts, tensors, widths.get(i))
    used |= _check_hf_layers(cache, facts, tensors, widths)
    used |= _check_queries(cache, facts, tensors)
    _require(used == set(tensors), f"tensors {', '.join(sorted(used ^ set(tensors)))[:80]}")


def check_context(context: Mapping[str, Any], seen: Sequence[int]) -> None:
    """Raise ValueError for what no context can hold. context: a text, its ids and the questions known at prefill"""
    _require(isinstance(context["text"], str), f"text {str(context['text'])[:80]!r}")
    _require(len(seen) == 1 and _is_int_list(context["ids"], seen[0]), f"ids of a text of {seen} tokens")
    questions = context["questions"]
    _require(isinstance(questions, list) and all(isinstance(each, str) for each in questions), "questions")


def check_stored(prefix: Mapping[str, Any], seen: Sequence[int], id: str) -> None:
    """Raise ValueError for what no stored prefix or text can hold; see `described` in engine/stored.py."""
    _require(prefix["id"] == id, f"id {str(prefix['id'])[:80]!r}")
    for kind, names in ((str, ("id", "place", "text")), (bool, ("public", "pinned", "frozen"))):
        for name in names:
            _require(type(prefix[name]) is kind, f"{name} {str(prefix[name])[:80]!r}")
    owners = prefix["owners"]
    _require(isinstance(owners, list) and all(type(each) is str for each in owners), f"owners {str(owners)[:80]}")
    _require(len(owners) == 1 or (prefix["public"] and len(owners) > 1), f"{len(owners)} owners")
    _require(_is_int_list([prefix["nbytes"]], 1), f"nbytes {str(prefix['nbytes'])[:80]}")
    _require(len(seen) == 1 and _is_int_list(prefix["ids"], seen[0]), f"ids of a prefix of {seen} tokens")
    _require(_is_int_list(prefix["cuts"], len(prefix["cuts"])), "cuts")


def _require(valid: bool, what: str) -> None:
    if not valid:
        raise ValueError(f"{what}: invalid")


def _is_int_list(values: Any, count: int) -> bool:
    """A list of `count` integers, none below 0."""
    return isinstance(values, list) and len(values) == count and all(type(n) is int and n >= 0 for n in values)


def _check_counts(facts: Mapping[str, Any], mask: Tensor | None) -> None:
    """Tokens seen and kept by each row, and their length with padding."""
    seen = facts["seen"]
    kept = facts["kept"]
    length = facts["padded_length"]
    _require(_is_int_list([facts["peak_bytes"], length], 2), f"peak_bytes {facts['peak_bytes']!r}, length {length!r}")
    _require(isinstance(seen, list) and all(_is_int_list(each, len(seen)) for each in (seen, kept)), "seen and kept")
    _require(all(k <= s <= length for k, s in zip(kept, seen, strict=True)), f"kept {kept}, seen {seen} of {length}")
    prompt = facts["prompt"]
    valid = _is_int_list(prompt, len(seen)) and all(p <= s for p, s in zip(prompt, seen, strict=True))
    _require(valid, f"prompts {prompt!r}")
    if mask is not None:
        _require(mask.dtype == torch.bool and mask.ndim == 2 and len(mask) == len(seen), "a mask of this shape")
    unpadded = length if mask is None else length - mask.shape[1]
    _require(unpadded >= 0 and all(s >= unpadded for s in seen), f"length {length} for {seen} tokens")
    _require(bool(seen) or not length, f"length {length} without rows")


def _check_layer(
    cache: CacheState, i: int, facts: Mapping[str, Any], tensors: Tensors, widths: tuple[int, int] | None
) -> set[str]:
    """widths: of a token's keys and values in all heads, where the model's code tells. -> names of the tensors used"""
    shape, seen = facts["layers"][str(i)], facts["seen"]
    _require(set(shape) == set(SHAPE), f"layer {i} with {', '.join(shape)[:80]}")
    rows, kv_heads, starts, lengths, room = (shape[name] for name in SHAPE)
    counts = _is_int_list([rows, kv_heads], 2) and rows == len(seen) and bool(kv_heads) == bool(rows)
    _require(counts, f"rows of layer {i}")
    segments = rows * kv_heads
    listed = segments < 2**31 and all(_is_int_list(each, segments) for each in (starts, lengths, room))
    _require(listed, f"sizes of layer {i}")
    *firsts, slots = accumulate(room, initial=0)
    fit = starts == firsts and all(n <= most for n, most in zip(lengths, room, strict=True))
    _require(fit, f"segments of layer {i}")
    if not rows:
        return set()
    method, dim, value_dim = cache.method, *_head_dims(cache, i, kv_heads, tensors, widths)
    kv_dtype = _dtype(cache, tensors[f"layer.{i}.{'tail_keys' if cache.backend.bits else 'keys'}"])
    expected: dict[str, tuple] = {"token_positions": (torch.int32, slots)}
    expected |= {"rope_positions": (None, slots)} if method.placement else {}
    expected |= {"token_state": (torch.float32, slots, method.memory.width)} if method.memory else {}
    if bits := cache.backend.bits:
        groups = facts["quantized"][str(i)]
        expected |= _quantized_tensors(rows, lengths, groups, bits, kv_dtype, dim, value_dim)
    else:
        expected |= {"keys": (kv_dtype, slots, dim), "values": (kv_dtype, slots, value_dim)}
    for name, (dtype, *sizes) in expected.items():
        tensor = tensors[f"layer.{i}.{name}"]
        fits = tensor.dtype in ((torch.int32, torch.int64) if dtype is None else (dtype,))  # None: integers
        what = f"layer.{i}.{name} of {tensor.dtype} and shape {list(tensor.shape)}"
        _require(fits and list(tensor.shape) == sizes, what)
    _check_positions(i, tensors, starts, lengths, [n for n in seen for _ in range(kv_heads)])
    return {f"layer.{i}.{name}" for name in expected}


def _head_dims(
    cache: CacheState, i: int, kv_heads: int, tensors: Tensors, widths: tuple[int, int] | None
) -> tuple[int, int]:
    """Sizes of one head's key and value: those of the tensors, if the model can have made them."""
    names = TAILS if cache.backend.bits else ("keys", "values")
    dim, value_dim = (tensors[f"layer.{i}.{name}"].shape[-1] for name in names)
    heads, size = key_shape(cache.model)
    widths = widths or (heads * size, heads * size)
    _require((kv_heads * dim, kv_heads * value_dim) == widths, f"{kv_heads} heads of {dim}, {value_dim} in layer {i}")
    _require(widths[0] != heads * size or kv_heads == heads, f"{kv_heads} heads in layer {i}")
    return dim, value_dim


def _dtype(cache: CacheState, tensor: Tensor) -> torch.dtype:
    _require(tensor.dtype in (cache.model.dtype, *HALF), f"keys of {tensor.dtype}")
    return tensor.dtype


def _quantized_tensors(
    rows: int, lengths: list[int], placed: Any, bits: int, kv_dtype: torch.dtype, dim: int, value_dim: int
) -> dict[str, tuple]:
    """dtype and shape of each tensor of kernels/torch/quantization.py. placed: where the groups lie"""
    _require(set(placed) == {"firsts", "room"}, "codes")
    firsts, room = placed["firsts"], placed["room"]
    _require(_is_int_list(firsts, len(lengths)) and _is_int_list(room, len(lengths)), "groups of codes")
    *starts, groups = accumulate(room, initial=0)
    _require(firsts == starts and all(n // GROUP_SIZE <= most for n, most in zip(lengths, room, strict=True)), "groups")
    groups, segments = max(1, groups), (rows, len(lengths) // rows, GROUP_SIZE)
    slots = groups * GROUP_SIZE
    scales: dict[str, tuple] = {f"key_{name}": (kv_dtype, groups, dim) for name in ("scales", "mins")}
    scales |= {f"value_{name}": (torch.float32, slots) for name in ("scales", "mins")}
    codes = {f"{name}_codes": (torch.uint8, slots, n * bits // 8) for name, n in (("key", dim), ("value", value_dim))}
    return scales | codes | {"tail_keys": (kv_dtype, *segments, dim), "tail_values": (kv_dtype, *segments, value_dim)}


def _check_positions(i: int, tensors: Tensors, starts: list[int], lengths: list[int], seen: list[int]) -> None:
    """Kept tokens have ascending positions below the tokens seen, and keys without NaN."""
    positions, keys = tensors[f"layer.{i}.token_positions"], tensors.get(f"layer.{i}.keys")
    for start, n, most in zip(starts, lengths, seen, strict=True):
        mine = positions[start : start + n]
        ascending = bool((mine[1:] > mine[:-1]).all())
        _require(not n or (ascending and int(mine[0]) >= 0 and int(mine[-1]) < most), f"positions of layer {i}")
        _require(keys is None or not keys[start : start + n].isnan().any(), f"keys of layer {i} that are not numbers")


def _check_hf_layers(
    cache: CacheState, facts: Mapping[str, Any], tensors: Tensors, widths: Mapping[int, tuple[int, int]]
) -> set[str]:
    """Layers left to transformers, each of which has seen every token."""
    rows = len(facts["seen"])
    seen = facts["padded_length"]
    lengths = facts["hf_layers"]
    left = [str(i) for i in range(len(cache.layers)) if i not in cache.compressed_layers]
    _require(set(lengths) == set(left if rows else ()), f"layers of transformers {', '.join(lengths)[:80]}")
    for i, length in lengths.items():
        keys, values = (tensors[f"hf_layer.{i}.{name}"] for name in ("keys", "values"))
        _require(type(length) is int and length == seen, f"length {length!r} of layer {i}")
        _require(keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3], f"shapes of layer {i}")
        _require(len(keys) == rows and 0 < keys.shape[2] <= seen, f"tokens of layer {i}")
        own = keys[0, :, 0].numel(), values[0, :, 0].numel()
        _require(own == widths.get(int(i), own), f"heads of layer {i}")
        _require(_dtype(cache, keys) == values.dtype, f"dtypes of layer {i}")
    return {f"hf_layer.{i}.{name}" for i in lengths for name in ("keys", "values")}


def _check_queries(cache: CacheState, facts: Mapping[str, Any], tensors: Tensors) -> set[str]:
    """Queries of existing rows, no more than the observation window. [heads, w, dim]"""
    layers, window = cache.compressed_layers, cache.backend.query_buffer.observation_window
    possible = {f"queries.{i}.{row}": i for i in layers for row in range(len(facts["seen"]))}
    found = {name: i for name, i in possible.items() if name in tensors}
    rows = {name.rpartition(".")[2] for name in found}
    _require(all(f"queries.{i}.{row}" in found for i in layers for row in rows), "queries of some layers only")
    for name, i in found.items():
        queries, keys = tensors[name], tensors[f"layer.{i}.{'tail_keys' if cache.backend.bits else 'keys'}"]
        shape, kv_heads = queries.shape, facts["layers"][str(i)]["kv_heads"]
        _require(queries.ndim == 3 and shape[-1] == keys.shape[-1] and shape[0] % kv_heads == 0, f"{name} of {shape}")
        if summary := cache.method.summary:
            valid = shape[1] == summary.rows(shape[-1]) and queries.dtype == torch.float64
        else:
            valid = 0 < shape[1] <= window and queries.dtype == keys.dtype
        _require(valid, f"{name} of {shape}")
    return set(found)
