"""Decode attention of a pool's rows over fetched units, which lie in slots in any order, and near tokens.

Split-K as in decode.py. A program goes through its part of the far tokens, finding each unit's slot, then of the near
ones. No length is known to the host, so everything can be captured in a CUDA graph. A second kernel adds the attention
that near tokens got to their mass.
"""

import triton
import triton.language as tl

from kvkeep.kernels.triton.common import cdiv, kernel, padded, pow2
from kvkeep.kernels.triton.decode import (
    PROGRAMS,
    merged_splits,
    part_of,
    softmax_weights,
    split_results,
    store_split,
)
from kvkeep.kernels.triton.tiles import add_keys, half_logits, load_rows, no_keys, softcapped

BLOCK = 64  # tokens per iteration
MASS_BLOCK = 32  # tokens per program


def slotted_attention(
    queries, rotated, far, slots, num_far, near, begin, end, sinks, unit, scale, softcap=None, sink_logits=None,
    angles=None, mass=None, band=0, active=None,
):  # fmt: skip
    """Do what the reference does. far, near, slots, num_far, begin, active: contiguous"""
    rows, heads, dim = queries.shape
    kv_heads, size, v_dim = near[1].shape[1:]
    group, most = heads // kv_heads, slots.shape[2]
    splits = max(1, min(cdiv(sinks + most * unit + size, 2 * BLOCK), PROGRAMS // (rows * kv_heads)))
    queries, rotated = queries.contiguous(), rotated.contiguous()
    partial, weight = split_results(queries, splits, v_dim)
    cos, sin = angles or (None, None)
    shared = scale, softcap, group, splits, dim
    _partial[rows * kv_heads, splits](
        queries, rotated, *far, slots, num_far, *near, begin, end, cos, sin, partial, weight, *shared, v_dim,
        end.stride(0), kv_heads, far[0].shape[2], size, most, sinks, unit, slots.shape[1] > 1, padded(group),
        padded(dim // 2), padded(v_dim), BLOCK, num_warps=4,
    )  # fmt: skip
    if mass is not None and band:
        _add_mass[cdiv(size, MASS_BLOCK), rows * mass.shape[1]](
            queries, near[0], begin, end, active, weight, sink_logits, mass, *shared, band, end.stride(0), heads, size,
            mass.shape[1] > 1, pow2(dim), pow2(splits), MASS_BLOCK, num_warps=4,
        )  # fmt: skip
    return merged_splits(queries, partial, weight, sink_logits)


@kernel(do_not_specialize=["splits", "far_size", "size", "most"])
def _partial(
    queries, rotated, far_keys, far_values, slots, num_far, keys, values, begin, end, cos, sin, partial, weight, scale,
    softcap, group, splits, dim, v_dim, end_row, kv_heads, far_size, size, most, sinks, unit, EACH_HEAD: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = segment // kv_heads
    m, near_first = tl.load(num_far + row).to(tl.int32), tl.load(begin + row).to(tl.int32)
    total = m + tl.load(end + row * end_row).to(tl.int32) - near_first
    first, last = part_of(total, split, splits, BLOCK)

    half, members = dim // 2, tl.arange(0, GROUP)
    in_group = members < group
    row_max, row_sum, result = no_keys(GROUP, V_DIM)
    a, b = _load_halves(rotated + (segment * group + members) * dim, in_group, half, HALF)
    if EACH_HEAD:
        slots += segment * most
    else:
        slots += row * most
    for start in range(first, tl.minimum(last, m), BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        valid = tokens < tl.minimum(last, m)
        behind = tokens - sinks
        slot = tl.load(slots + behind // unit, mask=valid & (behind >= 0), other=0)
        place = segment * far_size + tl.where(behind >= 0, sinks + slot * unit + behind % unit, tokens)
        k_a, k_b = _load_halves(far_keys + place * dim, valid, half, HALF)
        if cos is not None:
            angle = tokens * half
            c, s = load_rows(cos + angle, valid, half, HALF), load_rows(sin + angle, valid, half, HALF)
            x, y = k_a.to(tl.float32), k_b.to(tl.float32)
            k_a, k_b = (x * c - y * s).to(k_a.dtype), (y * c + x * s).to(k_b.dtype)
        row_max, row_sum, result = _add_keys(
            a, b, k_a, k_b, far_values + place * v_dim, valid, row_max, row_sum, result, v_dim, scale, softcap, V_DIM
        )
    a, b = _load_halves(queries + (segment * group + members) * dim, in_group, half, HALF)
    for start in range(tl.maximum(first, m), last, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        valid, place = tokens < last, segment * size + near_first + tokens - m
        k_a, k_b = _load_halves(keys + place * dim, valid, half, HALF)
        row_max, row_sum, result = _add_keys(
            a, b, k_a, k_b, values + place * v_dim, valid, row_max, row_sum, result, v_dim, scale, softcap, V_DIM
        )
    slot = (segment * group + members) * splits + split
    store_split(partial, weight, slot, in_group, row_max, row_sum, result, v_dim, V_DIM)


@triton.jit
def _load_halves(vectors, valid, half, HALF: tl.constexpr):
    """Load vectors in two halves: a rotation pairs the channels of one with those of the other."""
    return load_rows(vectors, valid, half, HALF), load_rows(vectors + half, valid, half, HALF)


@triton.jit
def _add_keys(
    a, b, k_a, k_b, values, valid, row_max, row_sum, result, v_dim, scale, softcap, V_DIM: tl.constexpr
):  # fmt: skip
    """Add a block of keys, in halves, to the online softmax."""
    logits = tl.where(valid[None, :], half_logits(a, b, k_a, k_b, scale, softcap), float("-inf"))
    return add_keys(logits, values, valid, row_max, row_sum, result, v_dim, V_DIM)


@kernel(do_not_specialize=["splits", "band", "size"])
def _add_mass(
    queries, keys, begin, end, active, weight, sink_logits, mass, scale, softcap, group, splits, dim, band, end_row,
    heads, size, PER_HEAD: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes a block of near tokens, and one query head (PER_HEAD) or the mean of all."""
    block, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PER_HEAD:
        row, first_head, num_heads = line // heads, line, 1
    else:
        row, first_head, num_heads = line, line * heads, heads
    first, last = tl.load(begin + row).to(tl.int32), tl.load(end + row * end_row).to(tl.int32)
    counts = first + block * BLOCK < last - 1
    if active is not None:
        counts = counts & (tl.load(active + row) > 0)
    if counts:
        places, channels = first + block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM)
        distance = last - 1 - places
        in_band = (distance > 0) & (distance <= band)
        received = tl.zeros([BLOCK], tl.float32)
        for member in range(0, num_heads):
            head = first_head + member
            query = tl.load(queries + head * dim + channels, mask=channels < dim, other=0.0).to(tl.float32)
            key = load_rows(keys + (head // group * size + places) * dim, in_band, dim, DIM)
            logits = tl.sum(key.to(tl.float32) * query[None, :], 1) * scale
            if softcap is not None:
                logits = softcapped(logits, softcap)
            sink = sink_logits
            if sink_logits is not None:
                sink = sink_logits + head % heads
            row_max, row_sum, _ = softmax_weights(weight + head * splits * 2, splits, sink, SPLITS)
            received += tl.where(in_band, tl.exp(logits - row_max) / row_sum, 0.0)
        pointer = mass + line * size + places
        before = tl.load(pointer, mask=in_band, other=0.0)
        tl.store(pointer, before + received / num_heads, mask=in_band)
