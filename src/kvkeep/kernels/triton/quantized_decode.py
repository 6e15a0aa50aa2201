"""Decode attention over keys and values quantized to 8 or 4 bits, dequantized inside the kernel; and append.

Split-K as in decode.py, with one more split for the tail. Channels come in two halves, as 4 bits store them: a byte is
read once and serves both. Probabilities are multiplied by the values' scales, not the values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.torch.quantization import GROUP_SIZE
from kvkeep.kernels.triton.common import cdiv, kernel, padded
from kvkeep.kernels.triton.decode import merged_splits, split_results
from kvkeep.kernels.triton.tiles import WIDE, add_logits, dot, half_logits

PROGRAMS = 1024  # of one warp each: a group of 32 tokens is little work


def append_quantized(kv, tail_keys, tail_values, key, value, starts, lengths, active):
    """Do what the reference does, without synchronizing the host."""
    _must_be_contiguous(tail_keys=tail_keys, tail_values=tail_values, lengths=lengths)
    (rows, kv_heads, dim), v_dim = key.shape, value.shape[-1]
    _append[rows * kv_heads,](
        key.to(tail_keys.dtype).contiguous(), value.to(tail_values.dtype).contiguous(), tail_keys, tail_values,
        *kv.tensors, starts.contiguous(), lengths, active.contiguous(), kv_heads, dim, v_dim, kv.bits,
        GROUP_SIZE, _padded_half(dim), _padded_half(v_dim), num_warps=4,
    )  # fmt: skip


def quantized_attention(
    queries, kv, tail_keys, tail_values, starts, lengths, longest, scale, softcap=None, sink_logits=None
):
    """Do what the reference does. queries [rows, heads, 1, dim] -> [rows, heads, 1, v_dim]"""
    _must_be_contiguous(tail_keys=tail_keys, tail_values=tail_values)
    rows, heads, _, dim = queries.shape
    kv_heads, v_dim = starts.shape[1], kv.value_dim
    group = heads // kv_heads
    splits = max(1, min(cdiv(longest, 4 * GROUP_SIZE), PROGRAMS // (rows * kv_heads)))
    query = queries[:, :, 0].to(tail_keys.dtype).contiguous()
    partial, weight = split_results(query, splits + 1, v_dim)
    _partial[rows * kv_heads, splits + 1](
        query, *kv.tensors, tail_keys, tail_values, starts.contiguous(), lengths.contiguous(), partial, weight, scale,
        softcap, group, splits, dim, v_dim, kv.bits, padded(group), GROUP_SIZE, _padded_half(dim), _padded_half(v_dim),
        num_warps=1, num_stages=3,
    )  # fmt: skip
    return merged_splits(queries[:, :, 0], partial, weight, sink_logits)[:, :, None]


def _padded_half(size: int) -> int:
    """Half of the channels, padded for a matrix product."""
    return padded(cdiv(size, 2))


def _must_be_contiguous(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: updated in place, it must be contiguous.")


@triton.jit
def _load_halves(buffer, at, channels, dim: tl.constexpr, valid):
    """Load the lower and upper half of the channels of vectors number `at`; zeros where not valid."""
    half: tl.constexpr = (dim + 1) // 2
    pointer = buffer + at * dim + channels
    low = tl.load(pointer, mask=valid & (channels < half), other=0)
    high = tl.load(pointer + half, mask=valid & (channels < dim - half), other=0)
    return low, high


@triton.jit
def _load_codes(buffer, at, channels, dim: tl.constexpr, BITS: tl.constexpr):
    """The same of codes, as float32."""
    if BITS == 8:
        low, high = _load_halves(buffer, at, channels, dim, channels < dim)
    else:
        both = tl.load(buffer + at * (dim // 2) + channels, mask=channels < dim // 2, other=0)
        low, high = both & 15, both >> 4
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _round_to(numbers, kind: tl.constexpr):
    """float32 to another dtype, rounded to nearest: Triton's interpreter would truncate to bfloat16."""
    if WIDE and kind == tl.bfloat16:
        bits = numbers.to(tl.int32, bitcast=True)
        numbers = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return numbers.to(kind)


@kernel(do_not_specialize=["splits"])
def _partial(
    query, key_codes, key_scales, key_mins, value_codes, value_scales, value_mins, tail_keys, tail_values, starts,
    lengths, partial, weight, scale, softcap, group, splits, dim: tl.constexpr, v_dim: tl.constexpr, BITS: tl.constexpr,
    MEMBERS: tl.constexpr, GROUP_SIZE: tl.constexpr, HALF_DIM: tl.constexpr, HALF_V_DIM: tl.constexpr,
):  # fmt: skip
    CENTRE: tl.constexpr = 2 ** (BITS - 1)
    segment, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base, length = tl.load(starts + segment).to(tl.int64), tl.load(lengths + segment).to(tl.int32)
    groups = length // GROUP_SIZE
    split_groups = tl.cdiv(groups, splits)  # the last split, for the tail, gets no group

    members, tokens = tl.arange(0, MEMBERS), tl.arange(0, GROUP_SIZE)[:, None]
    channels, v_channels = tl.arange(0, HALF_DIM), tl.arange(0, HALF_V_DIM)
    in_group = members < group
    q_low, q_high = _load_halves(query, (segment * group + members)[:, None], channels[None, :], dim, in_group[:, None])
    kind: tl.constexpr = q_low.dtype
    row_max = tl.full([MEMBERS], float("-inf"), tl.float32)
    row_sum = tl.zeros([MEMBERS], tl.float32)
    out_low = tl.zeros([MEMBERS, HALF_V_DIM], tl.float32)
    out_high = tl.zeros([MEMBERS, HALF_V_DIM], tl.float32)

    for i in range(split * split_groups, tl.minimum(split * split_groups + split_groups, groups)):
        at, slots = base // GROUP_SIZE + i, base + i * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
        low_scale, high_scale = _load_halves(key_scales, at, channels, dim, channels < dim)
        low_min, high_min = _load_halves(key_mins, at, channels, dim, channels < dim)
        k_low, k_high = _load_codes(key_codes, slots[:, None], channels[None, :], dim, BITS)
        k_low = k_low * low_scale.to(tl.float32)[None, :] + low_min.to(tl.float32)[None, :]
        k_high = k_high * high_scale.to(tl.float32)[None, :] + high_min.to(tl.float32)[None, :]
        k_low, k_high = _round_to(k_low, kind), _round_to(k_high, kind)
        logits = half_logits(q_low, q_high, k_low, k_high, scale, softcap)
        probs, rescale, row_max, row_sum = add_logits(logits, row_max, row_sum)

        v_scale, v_min = tl.load(value_scales + slots), tl.load(value_mins + slots)
        max_scale = tl.max(v_scale, 0)  # factored out: probs times scales may underflow in the model's dtype
        scaled = _round_to(probs * (v_scale / tl.where(max_scale == 0, 1.0, max_scale))[None, :], kind)
        middle = tl.sum(probs * (v_min + v_scale * CENTRE)[None, :], 1)[:, None]
        v_low, v_high = _load_codes(value_codes, slots[:, None], v_channels[None, :], v_dim, BITS)
        v_low, v_high = (v_low - CENTRE).to(kind), (v_high - CENTRE).to(kind)
        out_low = out_low * rescale[:, None] + (dot(scaled, v_low) * max_scale + middle)
        out_high = out_high * rescale[:, None] + (dot(scaled, v_high) * max_scale + middle)

    rest, in_tail = length - groups * GROUP_SIZE, segment * GROUP_SIZE + tokens
    if (split == splits) & (rest > 0):
        k_low, k_high = _load_halves(tail_keys, in_tail, channels[None, :], dim, tokens < rest)
        logits = half_logits(q_low, q_high, k_low, k_high, scale, softcap)
        logits = tl.where(tl.trans(tokens) < rest, logits, float("-inf"))
        probs, rescale, row_max, row_sum = add_logits(logits, row_max, row_sum)
        v_low, v_high = _load_halves(tail_values, in_tail, v_channels[None, :], v_dim, tokens < rest)
        rounded = _round_to(probs, kind)
        out_low, out_high = dot(rounded, v_low), dot(rounded, v_high)

    slot = (segment * group + members) * (splits + 1) + split
    tl.store(weight + slot * 2, row_max, mask=in_group)
    tl.store(weight + slot * 2 + 1, row_sum, mask=in_group)
    _store_halves(partial, slot[:, None], v_channels[None, :], v_dim, in_group[:, None], out_low, out_high)


@triton.jit
def _store_halves(buffer, at, channels, dim: tl.constexpr, valid, low, high):
    """The reverse of `_load_halves`."""
    half: tl.constexpr = (dim + 1) // 2
    pointer = buffer + at * dim + channels
    tl.store(pointer, low.to(buffer.dtype.element_ty), mask=valid & (channels < half))
    tl.store(pointer + half, high.to(buffer.dtype.element_ty), mask=valid & (channels < dim - half))


@triton.jit
def _store_codes(buffer, at, channels, dim: tl.constexpr, low, high, BITS: tl.constexpr):
    """The reverse of `_load_codes`."""
    if BITS == 8:
        _store_halves(buffer, at, channels, dim, channels < dim, low, high)
    else:
        both = (low | (high << 4)).to(tl.uint8)
        tl.store(buffer + at * (dim // 2) + channels, both, mask=channels < dim // 2)


@triton.jit
def _quantize(numbers, scale, least, BITS: tl.constexpr):
    """The code of each number. -> int32"""
    exact = tl.div_rn(numbers - least, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(numbers))
    codes = tl.minimum(tl.maximum(tl.floor(exact + 0.5), 0.0), 2.0**BITS - 1)
    return tl.where(scale == 0, 0.0, codes).to(tl.int32)


@triton.jit
def _full_tail(tail, new, segment, at, channels, dim: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """The 31 tokens of a tail and the new one. -> two halves [32, half] float32"""
    within = tl.arange(0, GROUP_SIZE)[:, None]
    old = _load_halves(tail, segment * GROUP_SIZE + within, channels[None, :], dim, within < at)
    last = _load_halves(new, segment, channels, dim, channels < dim)
    low = tl.where(within < at, old[0], last[0][None, :])
    high = tl.where(within < at, old[1], last[1][None, :])
    return low.to(tl.float32), high.to(tl.float32)


@kernel()
def _append(
    key, value, tail_keys, tail_values, key_codes, key_scales, key_mins, value_codes, value_scales, value_mins, starts,
    lengths, active, kv_heads, dim: tl.constexpr, v_dim: tl.constexpr, BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, HALF_DIM: tl.constexpr, HALF_V_DIM: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0).to(tl.int64)
    channels, v_channels = tl.arange(0, HALF_DIM), tl.arange(0, HALF_V_DIM)
    if tl.load(active + segment // kv_heads) != 0:
        length = tl.load(lengths + segment).to(tl.int64)
        at = length % GROUP_SIZE
        if at == GROUP_SIZE - 1:
            first = tl.load(starts + segment).to(tl.int64) + length - at
            k_low, k_high = _full_tail(tail_keys, key, segment, at, channels, dim, GROUP_SIZE)
            _quantize_keys(key_codes, key_scales, key_mins, first, channels, dim, k_low, k_high, BITS, GROUP_SIZE)
            v_low, v_high = _full_tail(tail_values, value, segment, at, v_channels, v_dim, GROUP_SIZE)
            _quantize_values(
                value_codes, value_scales, value_mins, first, v_channels, v_dim, v_low, v_high, BITS, GROUP_SIZE
            )  # fmt: skip
        k_low, k_high = _load_halves(key, segment, channels, dim, channels < dim)
        _store_halves(tail_keys, segment * GROUP_SIZE + at, channels, dim, channels < dim, k_low, k_high)
        v_low, v_high = _load_halves(value, segment, v_channels, v_dim, v_channels < v_dim)
        _store_halves(tail_values, segment * GROUP_SIZE + at, v_channels, v_dim, v_channels < v_dim, v_low, v_high)
        tl.store(lengths + segment, (length + 1).to(lengths.dtype.element_ty))


@triton.jit
def _quantize_keys(
    codes, scales, mins, first, channels, dim: tl.constexpr, low, high, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr
):
    """A group of keys, per channel; mins are keys, hence exact. low, high [32, half] float32"""
    kind: tl.constexpr = scales.dtype.element_ty
    low_min, high_min = tl.min(low, 0), tl.min(high, 0)
    low_scale = _round_to((tl.max(low, 0) - low_min) * (1 / (2**BITS - 1)), kind)
    high_scale = _round_to((tl.max(high, 0) - high_min) * (1 / (2**BITS - 1)), kind)
    _store_halves(scales, first // GROUP_SIZE, channels, dim, channels < dim, low_scale, high_scale)
    _store_halves(mins, first // GROUP_SIZE, channels, dim, channels < dim, low_min, high_min)
    low = _quantize(low, low_scale.to(tl.float32)[None, :], low_min[None, :], BITS)
    high = _quantize(high, high_scale.to(tl.float32)[None, :], high_min[None, :], BITS)
    _store_codes(codes, first + tl.arange(0, GROUP_SIZE)[:, None], channels[None, :], dim, low, high, BITS)


@triton.jit
def _quantize_values(
    codes, scales, mins, first, v_channels, v_dim: tl.constexpr, low, high, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr
):
    """A group of values, per token. low, high [32, half] float32"""
    half: tl.constexpr = (v_dim + 1) // 2
    in_low, in_high = (v_channels < half)[None, :], (v_channels < v_dim - half)[None, :]
    inf = float("inf")
    least = tl.minimum(tl.min(tl.where(in_low, low, inf), 1), tl.min(tl.where(in_high, high, inf), 1))
    most = tl.maximum(tl.max(tl.where(in_low, low, -inf), 1), tl.max(tl.where(in_high, high, -inf), 1))
    scale = (most - least) * (1 / (2**BITS - 1))
    tl.store(scales + first + tl.arange(0, GROUP_SIZE), scale)
    tl.store(mins + first + tl.arange(0, GROUP_SIZE), least)
    low = _quantize(low, scale[:, None], least[:, None], BITS)
    high = _quantize(high, scale[:, None], least[:, None], BITS)
    _store_codes(codes, first + tl.arange(0, GROUP_SIZE)[:, None], v_channels[None, :], v_dim, low, high, BITS)
