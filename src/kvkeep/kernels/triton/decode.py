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

from kvkeep.kernels.triton.common import cdiv, floats, kernel, padded, pow2
from kvkeep.kernels.triton.tiles import add_keys, attention_logits, copy_rows, load_rows, no_keys, store_rows

BLOCK = 64  # tokens per iteration
COPIED = 64  # tokens per iteration of a copy
PROGRAMS = 512  # enough to fill a large GPU


def ragged_attention(
    queries, keys, values, starts, lengths, longest, scale, softcap=None, sink_logits=None, lse_out=None,
    logits_out=None,
):  # fmt: skip
    """Do what the reference does. queries [rows, heads, 1, dim]; logits_out as in `padded_attention`"""
    rows, heads, _, dim = queries.shape
    kv_heads, v_dim = starts.shape[1], values.shape[-1]
    group = heads // kv_heads
    splits = max(1, min(cdiv(longest, 2 * BLOCK), PROGRAMS // (rows * kv_heads)))
    query = queries[:, :, 0].contiguous()
    partial, weight = split_results(query, splits, v_dim)
    row_stride, stride = (0, 0) if logits_out is None else logits_out.stride()[:2]
    _partial[rows * kv_heads, splits](
        query, keys, values, starts, lengths, partial, weight, logits_out, scale, softcap, kv_heads, group, splits,
        dim, v_dim, row_stride, stride, padded(group), padded(dim), padded(v_dim), BLOCK, num_warps=4, num_stages=2,
    )  # fmt: skip
    return merged_splits(query, partial, weight, sink_logits, lse_out)[:, :, None]


def split_results(query: Tensor, splits: int, v_dim: int) -> tuple[Tensor, Tensor]:
    """Uninitialized: each split's output, and its largest logit and sum of exponentials. query [rows, heads, dim]"""
    partial = floats(query, query.shape[:2].numel(), splits, v_dim)
    return partial, partial.new_empty(*partial.shape[:2], 2)


def merged_splits(
    query: Tensor,
    partial: Tensor,
    weight: Tensor,
    sink_logits: Tensor | None,
    lse_out: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention from that over each split. lse_out as in `ragged_attention` -> [rows, heads, v_dim]"""
    (rows, heads, _), (_, splits, v_dim) = query.shape, partial.shape
    output, (lse, place) = query.new_empty(rows, heads, v_dim), lse_out or (None, None)
    places = 0 if lse is None else lse.shape[2]
    _merge[rows * heads,](
        partial, weight, sink_logits, output, lse, place, places, heads, splits, v_dim, pow2(splits), pow2(v_dim),
        num_warps=1,
    )  # fmt: skip
    return output


def padded_attention(queries, keys, values, lengths, scale, softcap=None, sink_logits=None, logits_out=None):
    """Do what the reference does, for contiguous keys and values [rows, kv_heads, size, dim]."""
    size = keys.shape[2]
    starts = torch.arange(0, lengths.numel() * size, size, device=keys.device).view_as(lengths)
    flat = keys.view(-1, keys.shape[-1]), values.view(-1, values.shape[-1])
    return ragged_attention(queries, *flat, starts, lengths, size, scale, softcap, sink_logits, None, logits_out)


def append_ragged(keys, values, new_keys, new_values, starts, lengths, active):
    """Do what the reference does."""
    rows, kv_heads, _, dim = new_keys.shape
    v_dim = new_values.shape[-1]
    _append[rows * kv_heads,](
        keys, values, new_keys, new_values, starts, lengths, active, *new_keys.stride()[:2], *new_values.stride()[:2],
        lengths.stride(0), kv_heads, dim, v_dim, pow2(max(dim, v_dim)), num_warps=1,
    )  # fmt: skip


def copy_segments(keys, values, starts, source, first, ends, total):
    """Do what the reference does; starts may be strided."""
    dim, v_dim, segments = keys.shape[1], values.shape[1], len(starts)
    programs = max(1, cdiv(2 * cdiv(total, segments), COPIED))  # even of a segment twice as long as the others
    _copy_segments[segments, programs](
        *source, keys, values, first, starts, ends, starts.stride(0), dim, v_dim, pow2(dim), pow2(v_dim), COPIED,
        num_warps=4,
    )  # fmt: skip


@kernel()
def _copy_segments(
    source_keys, source_values, keys, values, source_starts, starts, ends, stride, dim, v_dim, DIM: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    first, end = tl.load(source_starts + segment).to(tl.int64), tl.load(ends + segment).to(tl.int64)
    shift = tl.load(starts + segment * stride).to(tl.int64) - first
    for start in range(first + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        copy_rows(source_keys + tokens * dim, keys + (tokens + shift) * dim, tokens < end, dim, DIM)
        copy_rows(source_values + tokens * v_dim, values + (tokens + shift) * v_dim, tokens < end, v_dim, V_DIM)


@kernel()
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


@kernel(do_not_specialize=["splits"])
def _partial(
    query, keys, values, starts, lengths, partial, weight, logits_out, scale, softcap, kv_heads, group, splits, dim,
    v_dim, row_stride, stride, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment, split = tl.program_id(0), tl.program_id(1)
    base, length = tl.load(starts + segment).to(tl.int64), tl.load(lengths + segment).to(tl.int32)
    first, end = part_of(length, split, splits, BLOCK)
    members = tl.arange(0, GROUP)
    in_group = members < group
    q = load_rows(query + (segment * group + members) * dim, in_group, dim, DIM)
    row_max, row_sum, output = no_keys(GROUP, V_DIM)
    for start in range(first, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        valid, slots = tokens < end, base + tokens
        k = load_rows(keys + slots * dim, valid, dim, DIM)
        logits = attention_logits(q, tl.trans(k), scale, softcap)
        logits = tl.where(valid[None, :], logits, float("-inf"))
        if logits_out is not None:
            head = segment % kv_heads * group + members
            observed = logits_out + (segment // kv_heads).to(tl.int64) * row_stride + (head * stride)[:, None]
            tl.store(observed + tokens[None, :], logits, mask=in_group[:, None] & valid[None, :])
        row_max, row_sum, output = add_keys(
            logits, values + slots * v_dim, valid, row_max, row_sum, output, v_dim, V_DIM
        )
    slot = (segment * group + members) * splits + split
    store_split(partial, weight, slot, in_group, row_max, row_sum, output, v_dim, V_DIM)


@triton.jit
def part_of(length, split, splits, BLOCK: tl.constexpr):
    """First token and end of a split: equal parts, of whole blocks."""
    size = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    return split * size, tl.minimum(split * size + size, length)


@triton.jit
def store_split(partial, weight, slot, valid, row_max, row_sum, output, v_dim, V_DIM: tl.constexpr):
    """Store what `_merge` reads of each query's split."""
    tl.store(weight + slot * 2, row_max, mask=valid)
    tl.store(weight + slot * 2 + 1, row_sum, mask=valid)
    store_rows(partial + slot * v_dim, output, valid, v_dim, V_DIM)


@triton.jit
def softmax_weights(weight, splits, sink_logits, SPLITS: tl.constexpr):
    """A query's largest logit, sum of exponentials, and factor of each split; from zeros where it saw no key."""
    parts = tl.arange(0, SPLITS)
    split_max = tl.load(weight + parts * 2, mask=parts < splits, other=float("-inf"))
    split_sum = tl.load(weight + parts * 2 + 1, mask=parts < splits, other=0.0)
    row_max = tl.max(split_max, 0)
    if sink_logits is not None:
        sink = tl.load(sink_logits).to(tl.float32)
        row_max = tl.maximum(row_max, sink)
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)  # an empty segment gives zeros
    rescale = tl.exp(split_max - row_max)
    row_sum = tl.sum(rescale * split_sum, 0)
    if sink_logits is not None:
        row_sum += tl.exp(sink - row_max)
    return row_max, row_sum, rescale


@kernel(do_not_specialize=["splits"])
def _merge(
    partial, weight, sink_logits, output, lse, place, places, heads, splits, v_dim, SPLITS: tl.constexpr,
    V_DIM: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    parts, v_channels = tl.arange(0, SPLITS), tl.arange(0, V_DIM)
    if sink_logits is not None:
        sink_logits += query % heads
    row_max, row_sum, rescale = softmax_weights(weight + query * splits * 2, splits, sink_logits, SPLITS)
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)
    if lse is not None:
        tl.store(lse + query * places + tl.load(place + query // heads), row_max + tl.log(row_sum))
    outputs = load_rows(partial + (query * splits + parts) * v_dim, parts < splits, v_dim, V_DIM)
    result = tl.sum(outputs * rescale[:, None], 0) / row_sum
    tl.store(output + query * v_dim + v_channels, result.to(output.dtype.element_ty), mask=v_channels < v_dim)


QUERIES = 64  # per program, over all heads of a group


def extend_attention(queries, keys, values, starts, lengths, counts, scale, softcap=None, sink_logits=None):
    """Do what the reference does."""
    (rows, heads, q, dim), kv_heads, v_dim = queries.shape, starts.shape[1], values.shape[-1]
    group, members = heads // kv_heads, pow2(heads // kv_heads)
    tokens = max(1, QUERIES // members)
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    output = queries.new_empty(rows, heads, q, v_dim)
    _extend[cdiv(q, tokens), rows * kv_heads](
        queries, keys, values, starts.contiguous(), lengths.contiguous(), counts, sink_logits, output,
        *queries.stride()[:3], q, kv_heads, group, dim, v_dim, scale, softcap, members, tokens, padded(dim),
        padded(v_dim), BLOCK, num_warps=4, num_stages=2,
    )  # fmt: skip
    return output


@kernel(do_not_specialize=["q", "row_stride", "head_stride", "token_stride"])
def _extend(
    queries, keys, values, starts, lengths, counts, sink_logits, output, row_stride, head_stride, token_stride, q,
    kv_heads, group, dim, v_dim, scale, softcap, GROUP: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, segment = tl.program_id(0), tl.program_id(1)
    row, base = (segment // kv_heads).to(tl.int64), tl.load(starts + segment).to(tl.int64)
    length, count = tl.load(lengths + segment).to(tl.int32), tl.load(counts + row).to(tl.int32)
    places = tl.arange(0, GROUP * TOKENS)
    token, member = block * TOKENS + places // GROUP, places % GROUP
    head = segment % kv_heads * group + member
    there = (member < group) & (token < q)
    own = tl.where(there & (token >= q - count), length - q + token, -1)  # index of the query's own key
    where = queries + row * row_stride + head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
    query = load_rows(where, own >= 0, dim, DIM)
    last = tl.where(own >= 0, own, 2147483647)  # padding sees all, and gives zeros

    row_max, row_sum, attended = no_keys(GROUP * TOKENS, V_DIM)
    for start in range(0, tl.max(own, 0) + 1, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        valid, slots = tokens < length, base + tokens
        k = load_rows(keys + slots * dim, valid, dim, DIM)
        logits = attention_logits(query, tl.trans(k), scale, softcap)
        logits = tl.where(tokens[None, :] <= last[:, None], logits, float("-inf"))
        row_max, row_sum, attended = add_keys(
            logits, values + slots * v_dim, valid, row_max, row_sum, attended, v_dim, V_DIM
        )
    if sink_logits is not None:
        sink = tl.load(sink_logits + head, mask=member < group, other=0.0).to(tl.float32)
        top = tl.maximum(row_max, sink)
        rescale = tl.exp(row_max - top)
        attended, row_sum = attended * rescale[:, None], row_sum * rescale + tl.exp(sink - top)
    attended = attended / tl.where(own >= 0, row_sum, float("inf"))[:, None]
    store_rows(output + ((row * kv_heads * group + head) * q + token) * v_dim, attended, there, v_dim, V_DIM)
