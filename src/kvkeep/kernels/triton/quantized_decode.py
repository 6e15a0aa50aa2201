"""Attention over keys and values in 8 or 4 bits, which become numbers only inside the kernel; and one token more.

As in decode.py the tokens are split, then merged; one part more takes the tail. Channels are taken in two halves, as
4 bits store them: a byte is read once and serves both. Values are never multiplied by their steps: chances are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.torch.quantization import GROUP, Packed
from kvkeep.kernels.triton.common import AT_LEAST, INTERPRETED, capped, cdiv, power, product, quick
from kvkeep.kernels.triton.decode import PROGRAMS, _merge


def append_packed(
    packed: Packed,
    tail_keys: Tensor,
    tail_values: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    lengths: Tensor,
    active: Tensor,
) -> None:
    """As the torch function, except that the host does not wait.

    tail_keys [rows, kv_heads, 32, dim], tail_values [rows, kv_heads, 32, wide], key [rows, kv_heads, dim],
    value [rows, kv_heads, wide], starts and lengths [rows, kv_heads], active [rows, 1] of 0 and 1
    """
    _must_be_contiguous(tail_keys=tail_keys, tail_values=tail_values, lengths=lengths)
    (rows, kv_heads, dim), wide = key.shape, value.shape[-1]
    _append[rows * kv_heads,](
        key.to(tail_keys.dtype).contiguous(), value.to(tail_values.dtype).contiguous(), tail_keys, tail_values,
        *packed.tensors, starts.contiguous(), lengths, active.contiguous(), kv_heads, dim, wide, packed.bits,
        INTERPRETED, GROUP, _padded_half(dim), _padded_half(wide), num_warps=4,
    )  # fmt: skip


def attend_packed(
    queries: Tensor,
    packed: Packed,
    tail_keys: Tensor,
    tail_values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the torch function. queries [rows, heads, 1, dim] -> [rows, heads, 1, wide]"""
    _must_be_contiguous(tail_keys=tail_keys, tail_values=tail_values)
    rows, heads, _, dim = queries.shape
    kv_heads, wide = starts.shape[1], packed.wide
    group = heads // kv_heads
    splits = max(1, min(cdiv(longest, 4 * GROUP), PROGRAMS // (rows * kv_heads)))
    query = queries[:, :, 0].to(tail_keys.dtype).contiguous()
    partial = query.new_empty(rows * heads, splits + 1, wide, dtype=torch.float32)
    weight = query.new_empty(rows * heads, splits + 1, 2, dtype=torch.float32)  # largest logit, sum of exponentials
    _partial[rows * kv_heads, splits + 1](
        query, *packed.tensors, tail_keys, tail_values, starts.contiguous(), lengths.contiguous(), partial, weight,
        scale, softcap or 0.0, group, splits, dim, wide, packed.bits, softcap is not None, INTERPRETED,
        max(AT_LEAST, power(group)), GROUP, _padded_half(dim), _padded_half(wide), num_warps=4,
    )  # fmt: skip
    output = queries.new_empty(rows, heads, wide)
    extra = query if sinks is None else sinks.float().contiguous()
    _merge[rows * heads,](
        partial, weight, extra, output, heads, splits + 1, wide, sinks is not None, power(splits + 1), power(wide),
        num_warps=1,
    )  # fmt: skip
    return output[:, :, None]


def _padded_half(size: int) -> int:
    """Half of the channels, as wide as a matrix product wants it."""
    return max(AT_LEAST, power(cdiv(size, 2)))


def _must_be_contiguous(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: used where it lies, it must be contiguous.")


@triton.jit
def _halves(buffer, at, channels, dim: tl.constexpr, real):
    """Lower and upper half of the channels of the vectors `at` places of a buffer; zeros where they are not real."""
    half: tl.constexpr = (dim + 1) // 2
    here = buffer + at * dim + channels
    low = tl.load(here, mask=real & (channels < half), other=0)
    high = tl.load(here + half, mask=real & (channels < dim - half), other=0)
    return low, high


@triton.jit
def _codes(buffer, at, channels, dim: tl.constexpr, BITS: tl.constexpr):
    """The same of codes, as float32: all that is made of them is exact in any of the model's dtypes."""
    if BITS == 8:
        low, high = _halves(buffer, at, channels, dim, channels < dim)
    else:
        both = tl.load(buffer + at * (dim // 2) + channels, mask=channels < dim // 2, other=0)
        low, high = both & 15, both >> 4
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _rounded(numbers, kind: tl.constexpr, WIDEN: tl.constexpr):
    """float32 in another dtype, the nearest there: Triton's interpreter would cut off what bfloat16 cannot hold."""
    if WIDEN and kind == tl.bfloat16:
        bits = numbers.to(tl.int32, bitcast=True)
        numbers = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return numbers.to(kind)


@triton.jit
def _updated(logits, largest, total):
    """A block more of logits. -> chances relative to the new largest, what older ones shrink by, largest, total"""
    newest = tl.maximum(largest, tl.max(logits, 1))
    chances = tl.exp(logits - newest[:, None])
    shrink = tl.exp(largest - newest)
    return chances, shrink, newest, total * shrink + tl.sum(chances, 1)


@quick
@triton.jit
def _partial(
    query, key_codes, key_steps, key_zeros, value_codes, value_steps, value_zeros, tail_keys, tail_values, starts,
    lengths, partial, weight, scale, softcap, group, splits, dim: tl.constexpr, wide: tl.constexpr, BITS: tl.constexpr,
    CAPPED: tl.constexpr, WIDEN: tl.constexpr, MEMBERS: tl.constexpr, GROUP: tl.constexpr, HALF_DIM: tl.constexpr,
    HALF_WIDE: tl.constexpr,
):  # fmt: skip
    CENTRE: tl.constexpr = 2 ** (BITS - 1)
    place, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base, length = tl.load(starts + place).to(tl.int64), tl.load(lengths + place).to(tl.int32)
    groups = length // GROUP
    stretch = tl.cdiv(groups, splits)  # the last part, which takes the tail, gets no group

    members, tokens = tl.arange(0, MEMBERS), tl.arange(0, GROUP)[:, None]
    channels, wides = tl.arange(0, HALF_DIM), tl.arange(0, HALF_WIDE)
    mine = members < group
    q_low, q_high = _halves(query, (place * group + members)[:, None], channels[None, :], dim, mine[:, None])
    kind: tl.constexpr = q_low.dtype
    largest = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    out_low = tl.zeros([MEMBERS, HALF_WIDE], tl.float32)
    out_high = tl.zeros([MEMBERS, HALF_WIDE], tl.float32)

    for i in range(split * stretch, tl.minimum(split * stretch + stretch, groups)):
        at, slots = base // GROUP + i, base + i * GROUP + tl.arange(0, GROUP)
        low_step, high_step = _halves(key_steps, at, channels, dim, channels < dim)
        low_zero, high_zero = _halves(key_zeros, at, channels, dim, channels < dim)
        k_low, k_high = _codes(key_codes, slots[:, None], channels[None, :], dim, BITS)
        k_low = k_low * low_step.to(tl.float32)[None, :] + low_zero.to(tl.float32)[None, :]
        k_high = k_high * high_step.to(tl.float32)[None, :] + high_zero.to(tl.float32)[None, :]
        k_low, k_high = _rounded(k_low, kind, WIDEN), _rounded(k_high, kind, WIDEN)
        logits = product(q_low, tl.trans(k_low), WIDEN) + product(q_high, tl.trans(k_high), WIDEN)
        chances, shrink, largest, total = _updated(capped(logits * scale, softcap, CAPPED), largest, total)

        step, zero = tl.load(value_steps + slots), tl.load(value_zeros + slots)
        widest = tl.max(step, 0)  # kept apart: the model's dtype may be too narrow for chances in steps
        share = _rounded(chances * (step / tl.where(widest == 0, 1.0, widest))[None, :], kind, WIDEN)
        middle = tl.sum(chances * (zero + step * CENTRE)[None, :], 1)[:, None]
        v_low, v_high = _codes(value_codes, slots[:, None], wides[None, :], wide, BITS)
        v_low, v_high = (v_low - CENTRE).to(kind), (v_high - CENTRE).to(kind)
        out_low = out_low * shrink[:, None] + (product(share, v_low, WIDEN) * widest + middle)
        out_high = out_high * shrink[:, None] + (product(share, v_high, WIDEN) * widest + middle)

    rest = length - groups * GROUP
    if (split == splits) & (rest > 0):
        k_low, k_high = _halves(tail_keys, place * GROUP + tokens, channels[None, :], dim, tokens < rest)
        logits = product(q_low, tl.trans(k_low), WIDEN) + product(q_high, tl.trans(k_high), WIDEN)
        logits = tl.where(tl.trans(tokens) < rest, capped(logits * scale, softcap, CAPPED), float("-inf"))
        chances, shrink, largest, total = _updated(logits, largest, total)
        v_low, v_high = _halves(tail_values, place * GROUP + tokens, wides[None, :], wide, tokens < rest)
        share = _rounded(chances, kind, WIDEN)
        out_low, out_high = product(share, v_low, WIDEN), product(share, v_high, WIDEN)

    where = (place * group + members) * (splits + 1) + split
    tl.store(weight + where * 2, largest, mask=mine)
    tl.store(weight + where * 2 + 1, total, mask=mine)
    _store_halves(partial, where[:, None], wides[None, :], wide, mine[:, None], out_low, out_high)


@triton.jit
def _store_halves(buffer, at, channels, dim: tl.constexpr, real, low, high):
    """The reverse of `_halves`."""
    half: tl.constexpr = (dim + 1) // 2
    here = buffer + at * dim + channels
    tl.store(here, low.to(buffer.dtype.element_ty), mask=real & (channels < half))
    tl.store(here + half, high.to(buffer.dtype.element_ty), mask=real & (channels < dim - half))


@triton.jit
def _store_codes(buffer, at, channels, dim: tl.constexpr, low, high, BITS: tl.constexpr):
    """The reverse of `_codes`."""
    if BITS == 8:
        _store_halves(buffer, at, channels, dim, channels < dim, low, high)
    else:
        both = (low | (high << 4)).to(tl.uint8)
        tl.store(buffer + at * (dim // 2) + channels, both, mask=channels < dim // 2)


@triton.jit
def _coded(numbers, step, zero, BITS: tl.constexpr):
    """The code of each number. -> int32"""
    exact = tl.div_rn(numbers - zero, tl.where(step == 0, 1.0, step) + tl.zeros_like(numbers))
    codes = tl.minimum(tl.maximum(tl.floor(exact + 0.5), 0.0), 2.0**BITS - 1)
    return tl.where(step == 0, 0.0, codes).to(tl.int32)


@triton.jit
def _filled(tail, new, place, at, channels, dim: tl.constexpr, GROUP: tl.constexpr):
    """All tokens of a tail of which the last is still to be written. -> two halves [32, half] float32"""
    within = tl.arange(0, GROUP)[:, None]
    old = _halves(tail, place * GROUP + within, channels[None, :], dim, within < at)
    last = _halves(new, place, channels, dim, channels < dim)
    low = tl.where(within < at, old[0], last[0][None, :])
    high = tl.where(within < at, old[1], last[1][None, :])
    return low.to(tl.float32), high.to(tl.float32)


@quick
@triton.jit
def _append(
    key, value, tail_keys, tail_values, key_codes, key_steps, key_zeros, value_codes, value_steps, value_zeros, starts,
    lengths, active, kv_heads, dim: tl.constexpr, wide: tl.constexpr, BITS: tl.constexpr, WIDEN: tl.constexpr,
    GROUP: tl.constexpr, HALF_DIM: tl.constexpr, HALF_WIDE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    channels, wides = tl.arange(0, HALF_DIM), tl.arange(0, HALF_WIDE)
    if tl.load(active + place // kv_heads) != 0:
        length = tl.load(lengths + place).to(tl.int64)
        at = length % GROUP
        if at == GROUP - 1:
            first = tl.load(starts + place).to(tl.int64) + length - at
            k_low, k_high = _filled(tail_keys, key, place, at, channels, dim, GROUP)
            _pack_keys(key_codes, key_steps, key_zeros, first, channels, dim, k_low, k_high, BITS, WIDEN, GROUP)
            v_low, v_high = _filled(tail_values, value, place, at, wides, wide, GROUP)
            _pack_values(value_codes, value_steps, value_zeros, first, wides, wide, v_low, v_high, BITS, GROUP)
        k_low, k_high = _halves(key, place, channels, dim, channels < dim)
        _store_halves(tail_keys, place * GROUP + at, channels, dim, channels < dim, k_low, k_high)
        v_low, v_high = _halves(value, place, wides, wide, wides < wide)
        _store_halves(tail_values, place * GROUP + at, wides, wide, wides < wide, v_low, v_high)
        tl.store(lengths + place, (length + 1).to(lengths.dtype.element_ty))


@triton.jit
def _pack_keys(
    codes, steps, zeros, first, channels, dim: tl.constexpr, low, high, BITS: tl.constexpr, WIDEN: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """A group of keys, each channel by itself; zeros are keys, hence exact. low, high [32, half] float32"""
    kind: tl.constexpr = steps.dtype.element_ty
    low_zero, high_zero = tl.min(low, 0), tl.min(high, 0)
    low_step = _rounded((tl.max(low, 0) - low_zero) * (1 / (2**BITS - 1)), kind, WIDEN)
    high_step = _rounded((tl.max(high, 0) - high_zero) * (1 / (2**BITS - 1)), kind, WIDEN)
    _store_halves(steps, first // GROUP, channels, dim, channels < dim, low_step, high_step)
    _store_halves(zeros, first // GROUP, channels, dim, channels < dim, low_zero, high_zero)
    low = _coded(low, low_step.to(tl.float32)[None, :], low_zero[None, :], BITS)
    high = _coded(high, high_step.to(tl.float32)[None, :], high_zero[None, :], BITS)
    _store_codes(codes, first + tl.arange(0, GROUP)[:, None], channels[None, :], dim, low, high, BITS)


@triton.jit
def _pack_values(
    codes, steps, zeros, first, wides, wide: tl.constexpr, low, high, BITS: tl.constexpr, GROUP: tl.constexpr
):
    """A group of values, each token by itself. low, high [32, half] float32"""
    half: tl.constexpr = (wide + 1) // 2
    in_low, in_high = (wides < half)[None, :], (wides < wide - half)[None, :]
    inf = float("inf")
    zero = tl.minimum(tl.min(tl.where(in_low, low, inf), 1), tl.min(tl.where(in_high, high, inf), 1))
    most = tl.maximum(tl.max(tl.where(in_low, low, -inf), 1), tl.max(tl.where(in_high, high, -inf), 1))
    step = (most - zero) * (1 / (2**BITS - 1))
    tl.store(steps + first + tl.arange(0, GROUP), step)
    tl.store(zeros + first + tl.arange(0, GROUP), zero)
    low = _coded(low, step[:, None], zero[:, None], BITS)
    high = _coded(high, step[:, None], zero[:, None], BITS)
    _store_codes(codes, first + tl.arange(0, GROUP)[:, None], wides[None, :], wide, low, high, BITS)
