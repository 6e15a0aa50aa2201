"""One query per row over tokens that lie anywhere in a flat buffer, a stretch for each row and key head.

Split over the tokens, then merged: a program takes one key head of one row, all query heads of its group, and one of
`splits` equal parts of its tokens; it leaves a partial output with its largest logit and its sum. Nothing depends on
the host knowing a length, so the whole can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import AT_LEAST, INTERPRETED, capped, cdiv, power, product, quick

BLOCK = 64  # tokens at a time
PROGRAMS = 512  # enough to fill a large GPU


def attend_ragged(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference's.

    queries [rows, heads, 1, dim], keys and values [slots, dim], starts and lengths [rows, kv_heads]
    -> [rows, heads, 1, dim]
    """
    rows, heads, _, dim = queries.shape
    kv_heads, wide = starts.shape[1], values.shape[-1]
    group = heads // kv_heads
    splits = max(1, min(cdiv(longest, 2 * BLOCK), PROGRAMS // (rows * kv_heads)))
    query = queries[:, :, 0].contiguous()
    partial = query.new_empty(rows * heads, splits, wide, dtype=torch.float32)
    weight = query.new_empty(rows * heads, splits, 2, dtype=torch.float32)  # largest logit, sum of exponentials
    _partial[rows * kv_heads, splits](
        query, keys, values, starts, lengths, partial, weight, scale, softcap or 0.0, group, splits, dim, wide,
        softcap is not None, INTERPRETED, max(AT_LEAST, power(group)), max(AT_LEAST, power(dim)),
        max(AT_LEAST, power(wide)), BLOCK, num_warps=4,
    )  # fmt: skip
    output = query.new_empty(rows, heads, wide)
    extra = query if sinks is None else sinks.float().contiguous()
    _merge[rows * heads,](
        partial, weight, extra, output, heads, splits, wide, sinks is not None, power(splits), power(wide), num_warps=1
    )
    return output[:, :, None]


def attend_slots(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same where every stretch has as many slots. keys and values [rows, kv_heads, size, dim], contiguous"""
    size = keys.shape[2]
    starts = torch.arange(0, lengths.numel() * size, size, device=keys.device).view_as(lengths)
    flat = keys.view(-1, keys.shape[-1]), values.view(-1, values.shape[-1])
    return attend_ragged(queries, *flat, starts, lengths, size, scale, softcap, sinks)


def append_ragged(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, starts: Tensor, lengths: Tensor, active: Tensor
) -> None:
    """As the reference's."""
    rows, kv_heads, _, dim = new_keys.shape
    wide = new_values.shape[-1]
    _append[rows * kv_heads,](
        keys, values, new_keys, new_values, starts, lengths, active, *new_keys.stride()[:2], *new_values.stride()[:2],
        kv_heads, dim, wide, power(max(dim, wide)), num_warps=1,
    )  # fmt: skip


@quick
@triton.jit
def _append(
    keys, values, new_keys, new_values, starts, lengths, active, key_row, key_head, value_row, value_head, kv_heads,
    dim, wide, DIM: tl.constexpr,
):  # fmt: skip
    place, channels = tl.program_id(0), tl.arange(0, DIM)
    row, head = place // kv_heads, place % kv_heads
    length = tl.load(lengths + place)
    slot = tl.load(starts + place).to(tl.int64) + length
    key = tl.load(new_keys + row * key_row + head * key_head + channels, mask=channels < dim)
    value = tl.load(new_values + row * value_row + head * value_head + channels, mask=channels < wide)
    tl.store(keys + slot * dim + channels, key.to(keys.dtype.element_ty), mask=channels < dim)
    tl.store(values + slot * wide + channels, value.to(values.dtype.element_ty), mask=channels < wide)
    tl.store(lengths + place, length + tl.load(active + row))


@quick
@triton.jit
def _partial(
    query, keys, values, starts, lengths, partial, weight, scale, softcap, group, splits, dim, wide,
    CAPPED: tl.constexpr, WIDEN: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place, split = tl.program_id(0), tl.program_id(1)
    base, length = tl.load(starts + place).to(tl.int64), tl.load(lengths + place).to(tl.int32)
    stretch = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    first, end = split * stretch, tl.minimum(split * stretch + stretch, length)

    members, channels, wides = tl.arange(0, GROUP), tl.arange(0, DIM), tl.arange(0, WIDE)
    asks = (members < group)[:, None] & (channels < dim)[None, :]
    q = tl.load(query + (place * group + members)[:, None] * dim + channels[None, :], mask=asks, other=0.0)

    largest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    output = tl.zeros([GROUP, WIDE], tl.float32)
    for start in range(first, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        real, slots = tokens < end, base + tokens
        inside = real[:, None] & (channels < dim)[None, :]
        k = tl.load(keys + slots[:, None] * dim + channels[None, :], mask=inside, other=0.0)
        logits = capped(product(q, tl.trans(k), WIDEN) * scale, softcap, CAPPED)
        logits = tl.where(real[None, :], logits, float("-inf"))
        newest = tl.maximum(largest, tl.max(logits, 1))
        chances = tl.exp(logits - newest[:, None])
        shrink = tl.exp(largest - newest)
        inside = real[:, None] & (wides < wide)[None, :]
        v = tl.load(values + slots[:, None] * wide + wides[None, :], mask=inside, other=0.0)
        output = output * shrink[:, None] + product(chances.to(v.dtype), v, WIDEN)
        total = total * shrink + tl.sum(chances, 1)
        largest = newest
    where = (place * group + members) * splits + split
    mine = members < group
    tl.store(weight + where * 2, largest, mask=mine)
    tl.store(weight + where * 2 + 1, total, mask=mine)
    tl.store(partial + where[:, None] * wide + wides[None, :], output, mask=mine[:, None] & (wides < wide)[None, :])


@quick
@triton.jit
def _merge(
    partial, weight, sinks, output, heads, splits, wide, SUNK: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr
):
    place = tl.program_id(0)
    parts, wides = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    there = parts < splits
    at = place * splits + parts
    largest = tl.load(weight + at * 2, mask=there, other=float("-inf"))
    total = tl.load(weight + at * 2 + 1, mask=there, other=0.0)
    most = tl.max(largest, 0)
    if SUNK:
        sink = tl.load(sinks + place % heads)
        most = tl.maximum(most, sink)
    most = tl.where(most == float("-inf"), 0.0, most)  # nothing to attend to gives zeros
    shares = tl.exp(largest - most)
    below = tl.sum(shares * total, 0)
    if SUNK:
        below += tl.exp(sink - most)
    inside = there[:, None] & (wides < wide)[None, :]
    pieces = tl.load(partial + at[:, None] * wide + wides[None, :], mask=inside, other=0.0)
    result = tl.sum(pieces * shares[:, None], 0) / tl.where(below == 0, 1.0, below)
    tl.store(output + place * wide + wides, result.to(output.dtype.element_ty), mask=wides < wide)
