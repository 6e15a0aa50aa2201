"""Decode attention of a pool's rows over fetched units, which lie in slots in any order, and near tokens.

Split-K as in decode.py. A program goes through its part of the far tokens, finding each unit's slot, then of the near
ones. No length is known to the host, so everything can be captured in a CUDA graph. A second kernel adds the attention
that near tokens got to their mass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import INTERPRETED, MIN_BLOCK, cdiv, dot, fast_launch, pow2, softcapped
from kvkeep.kernels.triton.decode import PROGRAMS, _merge

BLOCK = 64  # tokens per iteration
MASS_BLOCK = 32  # tokens per program
Pair = tuple[Tensor, Tensor]


def slotted_attention(
    queries: Tensor,
    rotated: Tensor,
    far: Pair,
    slots: Tensor,
    num_far: Tensor,
    near: Pair,
    begin: Tensor,
    end: Tensor,
    sinks: int,
    unit: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    angles: Pair | None = None,
    mass: Tensor | None = None,
    band: int = 0,
    active: Tensor | None = None,
) -> Tensor:
    """Do what the reference does. far, near, slots, num_far, begin, active: contiguous"""
    rows, heads, dim = queries.shape
    kv_heads, size, v_dim = near[1].shape[1:]
    group, most = heads // kv_heads, slots.shape[2]
    splits = max(1, min(cdiv(sinks + most * unit + size, 2 * BLOCK), PROGRAMS // (rows * kv_heads)))
    queries, rotated = queries.contiguous(), rotated.contiguous()
    partial = torch.empty(rows * heads, splits, v_dim, dtype=torch.float32, device=queries.device)
    weight = torch.empty(rows * heads, splits, 2, dtype=torch.float32, device=queries.device)
    shared = scale, softcap or 0.0, group, splits, dim, v_dim
    _partial[rows * kv_heads, splits](
        queries, rotated, *far, slots, num_far, *near, begin, end, *(angles or far), partial, weight, *shared,
        end.stride(0), kv_heads, far[0].shape[2], size, most, sinks, unit, slots.shape[1] > 1, angles is not None,
        softcap is not None, INTERPRETED, max(MIN_BLOCK, pow2(group)), max(MIN_BLOCK, pow2(dim // 2)),
        max(MIN_BLOCK, pow2(v_dim)), BLOCK, num_warps=4,
    )  # fmt: skip
    output = torch.empty(rows, heads, v_dim, dtype=queries.dtype, device=queries.device)
    extra = queries if sink_logits is None else sink_logits.float().contiguous()
    _merge[rows * heads,](
        partial, weight, extra, output, heads, splits, v_dim, sink_logits is not None, pow2(splits), pow2(v_dim),
        num_warps=1,
    )  # fmt: skip
    if mass is not None and band:
        per_head = mass.shape[1] > 1
        _add_mass[cdiv(size, MASS_BLOCK), rows * mass.shape[1]](
            queries, near[0], begin, end, begin if active is None else active, weight, extra, mass, *shared[:5], band,
            end.stride(0), heads, size, active is not None, per_head, softcap is not None, sink_logits is not None,
            pow2(dim), pow2(splits), MASS_BLOCK, num_warps=4,
        )  # fmt: skip
    return output


@fast_launch
@triton.jit(do_not_specialize=["splits", "far_size", "size", "most"])
def _partial(
    queries, rotated, far_keys, far_values, slots, num_far, keys, values, begin, end, cos, sin, partial, weight, scale,
    softcap, group, splits, dim, v_dim, end_row, kv_heads, far_size, size, most, sinks, unit, EACH_HEAD: tl.constexpr,
    ANGLES: tl.constexpr, CAPPED: tl.constexpr, WIDEN: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Vectors come in halves: a rotation pairs the channels of one with those of the other."""
    segment, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = segment // kv_heads
    m, near_first = tl.load(num_far + row).to(tl.int32), tl.load(begin + row).to(tl.int32)
    total = m + tl.load(end + row * end_row).to(tl.int32) - near_first
    split_tokens = tl.cdiv(tl.cdiv(total, splits), BLOCK) * BLOCK
    first, last = split * split_tokens, tl.minimum(split * split_tokens + split_tokens, total)

    half, members = dim // 2, tl.arange(0, GROUP)
    channels, v_channels = tl.arange(0, HALF), tl.arange(0, V_DIM)
    in_query = (members < group)[:, None] & (channels < half)[None, :]
    query_place = (segment * group + members)[:, None] * dim + channels[None, :]
    row_max = tl.full([GROUP], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP], tl.float32)
    result = tl.zeros([GROUP, V_DIM], tl.float32)

    a = tl.load(rotated + query_place, mask=in_query, other=0.0)
    b = tl.load(rotated + query_place + half, mask=in_query, other=0.0)
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
        inside = valid[:, None] & (channels < half)[None, :]
        pointer = far_keys + place[:, None] * dim + channels[None, :]
        k_a, k_b = tl.load(pointer, mask=inside, other=0.0), tl.load(pointer + half, mask=inside, other=0.0)
        if ANGLES:
            angle = tokens[:, None] * dim + half + channels[None, :]  # the sines of the second half are not negated
            c, s = tl.load(cos + angle, mask=inside, other=0.0), tl.load(sin + angle, mask=inside, other=0.0)
            x, y = k_a.to(tl.float32), k_b.to(tl.float32)
            k_a, k_b = (x * c - y * s).to(k_a.dtype), (y * c + x * s).to(k_b.dtype)
        row_max, row_sum, result = _add_block(
            a, b, k_a, k_b, far_values, place, valid, row_max, row_sum, result, v_dim, scale, softcap, CAPPED, WIDEN,
            V_DIM,
        )  # fmt: skip
    a = tl.load(queries + query_place, mask=in_query, other=0.0)
    b = tl.load(queries + query_place + half, mask=in_query, other=0.0)
    for start in range(tl.maximum(first, m), last, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        valid, place = tokens < last, segment * size + near_first + tokens - m
        inside = valid[:, None] & (channels < half)[None, :]
        pointer = keys + place[:, None] * dim + channels[None, :]
        k_a, k_b = tl.load(pointer, mask=inside, other=0.0), tl.load(pointer + half, mask=inside, other=0.0)
        row_max, row_sum, result = _add_block(
            a, b, k_a, k_b, values, place, valid, row_max, row_sum, result, v_dim, scale, softcap, CAPPED, WIDEN, V_DIM,
        )  # fmt: skip
    slot = (segment * group + members) * splits + split
    tl.store(weight + slot * 2, row_max, mask=members < group)
    tl.store(weight + slot * 2 + 1, row_sum, mask=members < group)
    out_mask = (members < group)[:, None] & (v_channels < v_dim)[None, :]
    tl.store(partial + slot[:, None] * v_dim + v_channels[None, :], result, mask=out_mask)


@triton.jit
def _add_block(
    a, b, k_a, k_b, values, place, valid, row_max, row_sum, result, v_dim, scale, softcap, CAPPED: tl.constexpr,
    WIDEN: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the online softmax."""
    v_channels = tl.arange(0, V_DIM)
    product = dot(a, tl.trans(k_a), WIDEN) + dot(b, tl.trans(k_b), WIDEN)
    logits = tl.where(valid[None, :], softcapped(product * scale, softcap, CAPPED), float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    probs = tl.exp(logits - new_max[:, None])
    rescale = tl.exp(row_max - new_max)
    inside = valid[:, None] & (v_channels < v_dim)[None, :]
    v = tl.load(values + place[:, None] * v_dim + v_channels[None, :], mask=inside, other=0.0)
    result = result * rescale[:, None] + dot(probs.to(v.dtype), v, WIDEN)
    return new_max, row_sum * rescale + tl.sum(probs, 1), result


@fast_launch
@triton.jit(do_not_specialize=["splits", "band", "size"])
def _add_mass(
    queries, keys, begin, end, active, weight, sink_logits, mass, scale, softcap, group, splits, dim, band, end_row,
    heads, size, GATED: tl.constexpr, PER_HEAD: tl.constexpr, CAPPED: tl.constexpr, HAS_SINK: tl.constexpr,
    DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes a block of near tokens, and one query head (PER_HEAD) or the mean of all."""
    block, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PER_HEAD:
        row, first_head, num_heads = line // heads, line, 1
    else:
        row, first_head, num_heads = line, line * heads, heads
    first, last = tl.load(begin + row).to(tl.int32), tl.load(end + row * end_row).to(tl.int32)
    counts = first + block * BLOCK < last - 1
    if GATED:
        counts = counts & (tl.load(active + row) > 0)
    if counts:
        places, channels, parts = first + block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM), tl.arange(0, SPLITS)
        distance = last - 1 - places
        in_band = (distance > 0) & (distance <= band)
        inside = in_band[:, None] & (channels < dim)[None, :]
        received = tl.zeros([BLOCK], tl.float32)
        for member in range(0, num_heads):
            head = first_head + member
            query = tl.load(queries + head * dim + channels, mask=channels < dim, other=0.0).to(tl.float32)
            segment = head // group
            key = tl.load(keys + (segment * size + places)[:, None] * dim + channels[None, :], mask=inside, other=0.0)
            logits = softcapped(tl.sum(key.to(tl.float32) * query[None, :], 1) * scale, softcap, CAPPED)
            pointer = weight + (head * splits + parts) * 2
            split_max = tl.load(pointer, mask=parts < splits, other=float("-inf"))
            split_sum = tl.load(pointer + 1, mask=parts < splits, other=0.0)
            row_max = tl.max(split_max, 0)
            if HAS_SINK:
                sink = tl.load(sink_logits + head % heads)
                row_max = tl.maximum(row_max, sink)
            row_sum = tl.sum(split_sum * tl.exp(split_max - row_max), 0)
            if HAS_SINK:
                row_sum += tl.exp(sink - row_max)
            received += tl.where(in_band, tl.exp(logits - row_max) / row_sum, 0.0)
        pointer = mass + line * size + places
        before = tl.load(pointer, mask=in_band, other=0.0)
        tl.store(pointer, before + received / num_heads, mask=in_band)
