"""Decode attention: one query per row over a flat buffer with one segment per row and KV head.

Split-K: a program takes one KV head of one row, all query heads of its group, and one of `splits` equal parts of its
tokens, and writes a partial output with its largest logit and its sum of exponentials; a second kernel merges them.
The host need not know any length, so both can be captured in a CUDA graph.

`extend_attention`, of several new tokens per row (a question about a compressed text): a program takes a block of a
row's queries, in all query heads of one KV head, and goes through the segment's tokens up to those queries' own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import INTERPRETED, MIN_BLOCK, cdiv, dot, fast_launch, pow2, softcapped

BLOCK = 64  # tokens per iteration
COPIED = 64  # tokens per iteration of a copy
PROGRAMS = 512  # enough to fill a large GPU


def ragged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    logits_out: Tensor | None = None,
) -> Tensor:
    """Do what the reference does. queries [rows, heads, 1, dim]; logits_out as in `padded_attention`"""
    rows, heads, _, dim = queries.shape
    kv_heads, v_dim = starts.shape[1], values.shape[-1]
    group = heads // kv_heads
    splits = max(1, min(cdiv(longest, 2 * BLOCK), PROGRAMS // (rows * kv_heads)))
    query = queries[:, :, 0].contiguous()
    partial = query.new_empty(rows * heads, splits, v_dim, dtype=torch.float32)
    weight = query.new_empty(rows * heads, splits, 2, dtype=torch.float32)  # largest logit, sum of exponentials
    logits, row_stride, stride = (weight, 0, 0) if logits_out is None else (logits_out, *logits_out.stride()[:2])
    _partial[rows * kv_heads, splits](
        query, keys, values, starts, lengths, partial, weight, logits, scale, softcap or 0.0, kv_heads, group, splits,
        dim, v_dim, row_stride, stride, softcap is not None, logits_out is not None, INTERPRETED,
        max(MIN_BLOCK, pow2(group)), max(MIN_BLOCK, pow2(dim)), max(MIN_BLOCK, pow2(v_dim)), BLOCK, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    output = query.new_empty(rows, heads, v_dim)
    extra = query if sink_logits is None else sink_logits.float().contiguous()
    _merge[rows * heads,](
        partial, weight, extra, output, heads, splits, v_dim, sink_logits is not None, pow2(splits), pow2(v_dim),
        num_warps=1,
    )  # fmt: skip
    return output[:, :, None]


def padded_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    logits_out: Tensor | None = None,
) -> Tensor:
    """Do what the reference does, for contiguous keys and values [rows, kv_heads, size, dim]."""
    size = keys.shape[2]
    starts = torch.arange(0, lengths.numel() * size, size, device=keys.device).view_as(lengths)
    flat = keys.view(-1, keys.shape[-1]), values.view(-1, values.shape[-1])
    return ragged_attention(queries, *flat, starts, lengths, size, scale, softcap, sink_logits, logits_out)


def append_ragged(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, starts: Tensor, lengths: Tensor, active: Tensor
) -> None:
    """Do what the reference does."""
    rows, kv_heads, _, dim = new_keys.shape
    v_dim = new_values.shape[-1]
    _append[rows * kv_heads,](
        keys, values, new_keys, new_values, starts, lengths, active, *new_keys.stride()[:2], *new_values.stride()[:2],
        lengths.stride(0), kv_heads, dim, v_dim, pow2(max(dim, v_dim)), num_warps=1,
    )  # fmt: skip


def copy_segments(
    keys: Tensor, values: Tensor, starts: Tensor, source: tuple[Tensor, Tensor], first: Tensor, ends: Tensor, total: int
) -> None:
    """Do what the reference does; starts may be strided."""
    dim, v_dim, segments = keys.shape[1], values.shape[1], len(starts)
    programs = max(1, cdiv(2 * cdiv(total, segments), COPIED))  # even of a segment twice as long as the others
    _copy_segments[segments, programs](
        *source, keys, values, first, starts, ends, starts.stride(0), dim, v_dim, pow2(dim), pow2(v_dim), COPIED,
        num_warps=4,
    )  # fmt: skip


@fast_launch
@triton.jit
def _copy_segments(
    source_keys, source_values, keys, values, source_starts, starts, ends, stride, dim, v_dim, DIM: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment, channels, v_channels = tl.program_id(0), tl.arange(0, DIM)[None, :], tl.arange(0, V_DIM)[None, :]
    first, end = tl.load(source_starts + segment).to(tl.int64), tl.load(ends + segment).to(tl.int64)
    shift = tl.load(starts + segment * stride).to(tl.int64) - first
    for start in range(first + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        tokens = (start + tl.arange(0, BLOCK))[:, None]
        inside, v_inside = (tokens < end) & (channels < dim), (tokens < end) & (v_channels < v_dim)
        key = tl.load(source_keys + tokens * dim + channels, mask=inside)
        value = tl.load(source_values + tokens * v_dim + v_channels, mask=v_inside)
        tl.store(keys + (tokens + shift) * dim + channels, key.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + (tokens + shift) * v_dim + v_channels, value.to(values.dtype.element_ty), mask=v_inside)


@fast_launch
@triton.jit
def _append(
    keys, values, new_keys, new_values, starts, lengths, active, key_row, key_head, value_row, value_head, length_row,
    kv_heads, dim, v_dim, DIM: tl.constexpr,
):  # fmt: skip
    segment, channels = tl.program_id(0), tl.arange(0, DIM)
    row, head = segment // kv_heads, segment % kv_heads
    lengths += row * length_row + head
    length = tl.load(lengths)
    slot = tl.load(starts + segment).to(tl.int64) + length
    key = tl.load(new_keys + row * key_row + head * key_head + channels, mask=channels < dim)
    value = tl.load(new_values + row * value_row + head * value_head + channels, mask=channels < v_dim)
    tl.store(keys + slot * dim + channels, key.to(keys.dtype.element_ty), mask=channels < dim)
    tl.store(values + slot * v_dim + channels, value.to(values.dtype.element_ty), mask=channels < v_dim)
    tl.store(lengths, length + tl.load(active + row))


@fast_launch
@triton.jit(do_not_specialize=["splits"])
def _partial(
    query, keys, values, starts, lengths, partial, weight, logits_out, scale, softcap, kv_heads, group, splits, dim,
    v_dim, row_stride, stride, CAPPED: tl.constexpr, OBSERVED: tl.constexpr, WIDEN: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment, split = tl.program_id(0), tl.program_id(1)
    base, length = tl.load(starts + segment).to(tl.int64), tl.load(lengths + segment).to(tl.int32)
    split_tokens = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    first, end = split * split_tokens, tl.minimum(split * split_tokens + split_tokens, length)

    members, channels, v_channels = tl.arange(0, GROUP), tl.arange(0, DIM), tl.arange(0, V_DIM)
    in_query = (members < group)[:, None] & (channels < dim)[None, :]
    q = tl.load(query + (segment * group + members)[:, None] * dim + channels[None, :], mask=in_query, other=0.0)

    head = segment % kv_heads * group + members
    observed = logits_out + (segment // kv_heads).to(tl.int64) * row_stride + (head * stride)[:, None]

    row_max = tl.full([GROUP], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP], tl.float32)
    output = tl.zeros([GROUP, V_DIM], tl.float32)
    for start in range(first, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        valid, slots = tokens < end, base + tokens
        inside = valid[:, None] & (channels < dim)[None, :]
        k = tl.load(keys + slots[:, None] * dim + channels[None, :], mask=inside, other=0.0)
        logits = softcapped(dot(q, tl.trans(k), WIDEN) * scale, softcap, CAPPED)
        logits = tl.where(valid[None, :], logits, float("-inf"))
        if OBSERVED:
            tl.store(observed + tokens[None, :], logits, mask=(members < group)[:, None] & valid[None, :])
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        probs = tl.exp(logits - new_max[:, None])
        rescale = tl.exp(row_max - new_max)
        inside = valid[:, None] & (v_channels < v_dim)[None, :]
        v = tl.load(values + slots[:, None] * v_dim + v_channels[None, :], mask=inside, other=0.0)
        output = output * rescale[:, None] + dot(probs.to(v.dtype), v, WIDEN)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        row_max = new_max
    slot = (segment * group + members) * splits + split
    in_group = members < group
    tl.store(weight + slot * 2, row_max, mask=in_group)
    tl.store(weight + slot * 2 + 1, row_sum, mask=in_group)
    out_mask = in_group[:, None] & (v_channels < v_dim)[None, :]
    tl.store(partial + slot[:, None] * v_dim + v_channels[None, :], output, mask=out_mask)


@fast_launch
@triton.jit(do_not_specialize=["splits"])
def _merge(
    partial, weight, sink_logits, output, heads, splits, v_dim, HAS_SINK: tl.constexpr, SPLITS: tl.constexpr,
    V_DIM: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    parts, v_channels = tl.arange(0, SPLITS), tl.arange(0, V_DIM)
    valid = parts < splits
    slot = query * splits + parts
    split_max = tl.load(weight + slot * 2, mask=valid, other=float("-inf"))
    split_sum = tl.load(weight + slot * 2 + 1, mask=valid, other=0.0)
    row_max = tl.max(split_max, 0)
    if HAS_SINK:
        sink = tl.load(sink_logits + query % heads)
        row_max = tl.maximum(row_max, sink)
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)  # an empty segment gives zeros
    rescale = tl.exp(split_max - row_max)
    row_sum = tl.sum(rescale * split_sum, 0)
    if HAS_SINK:
        row_sum += tl.exp(sink - row_max)
    inside = valid[:, None] & (v_channels < v_dim)[None, :]
    outputs = tl.load(partial + slot[:, None] * v_dim + v_channels[None, :], mask=inside, other=0.0)
    result = tl.sum(outputs * rescale[:, None], 0) / tl.where(row_sum == 0, 1.0, row_sum)
    tl.store(output + query * v_dim + v_channels, result.to(output.dtype.element_ty), mask=v_channels < v_dim)


QUERIES = 64  # per program, over all heads of a group


def extend_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    counts: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Do what the reference does."""
    (rows, heads, q, dim), kv_heads, v_dim = queries.shape, starts.shape[1], values.shape[-1]
    group, members = heads // kv_heads, pow2(heads // kv_heads)
    tokens = max(1, QUERIES // members)
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    output = queries.new_empty(rows, heads, q, v_dim)
    extra = queries if sink_logits is None else sink_logits.float().contiguous()
    _extend[cdiv(q, tokens), rows * kv_heads](
        queries, keys, values, starts.contiguous(), lengths.contiguous(), counts, extra, output, *queries.stride()[:3],
        q, kv_heads, group, dim, v_dim, scale, softcap or 0.0, softcap is not None, sink_logits is not None,
        INTERPRETED, members, tokens, max(MIN_BLOCK, pow2(dim)), max(MIN_BLOCK, pow2(v_dim)), BLOCK, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return output


@fast_launch
@triton.jit(do_not_specialize=["q", "row_stride", "head_stride", "token_stride"])
def _extend(
    queries, keys, values, starts, lengths, counts, sink_logits, output, row_stride, head_stride, token_stride, q,
    kv_heads, group, dim, v_dim, scale, softcap, CAPPED: tl.constexpr, HAS_SINK: tl.constexpr, WIDEN: tl.constexpr,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, segment = tl.program_id(0), tl.program_id(1)
    row, base = (segment // kv_heads).to(tl.int64), tl.load(starts + segment).to(tl.int64)
    length, count = tl.load(lengths + segment).to(tl.int32), tl.load(counts + row).to(tl.int32)
    places, channels, v_channels = tl.arange(0, GROUP * TOKENS), tl.arange(0, DIM), tl.arange(0, V_DIM)
    token, member = block * TOKENS + places // GROUP, places % GROUP
    head = segment % kv_heads * group + member
    there = (member < group) & (token < q)
    own = tl.where(there & (token >= q - count), length - q + token, -1)  # index of the query's own key
    where = queries + row * row_stride + head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
    query = tl.load(where[:, None] + channels[None, :], mask=(own >= 0)[:, None] & (channels < dim)[None, :], other=0.0)

    row_max = tl.full([GROUP * TOKENS], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP * TOKENS], tl.float32)
    attended = tl.zeros([GROUP * TOKENS, V_DIM], tl.float32)
    for start in range(0, tl.max(own, 0) + 1, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        valid, slots = tokens < length, base + tokens
        inside = valid[:, None] & (channels < dim)[None, :]
        k = tl.load(keys + slots[:, None] * dim + channels[None, :], mask=inside, other=0.0)
        logits = softcapped(dot(query, tl.trans(k), WIDEN) * scale, softcap, CAPPED)
        logits = tl.where(tokens[None, :] <= own[:, None], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # of padding, which sees nothing
        probs, rescale = tl.exp(logits - shift[:, None]), tl.exp(row_max - shift)
        inside = valid[:, None] & (v_channels < v_dim)[None, :]
        v = tl.load(values + slots[:, None] * v_dim + v_channels[None, :], mask=inside, other=0.0)
        attended = attended * rescale[:, None] + dot(probs.to(v.dtype), v, WIDEN)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        row_max = new_max
    if HAS_SINK:
        sink = tl.load(sink_logits + head, mask=member < group, other=0.0)
        top = tl.maximum(row_max, sink)
        rescale = tl.exp(row_max - top)
        attended, row_sum = attended * rescale[:, None], row_sum * rescale + tl.exp(sink - top)
    attended = attended / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    into = output + ((row * kv_heads * group + head) * q + token)[:, None] * v_dim + v_channels[None, :]
    tl.store(into, attended.to(output.dtype.element_ty), mask=there[:, None] & (v_channels < v_dim)[None, :])
