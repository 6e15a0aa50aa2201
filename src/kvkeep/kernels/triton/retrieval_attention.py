"""A window of queries over far keys, which they meet turned, and near ones: one softmax, no matrix of queries × keys.

A program takes one head and a block of its queries through all far keys, then through the near ones it can see. Where
somebody asks what near keys got, it leaves each query's log-sum-exp, from which a second pass over near keys adds up
the chances of the queries close behind each: by query head, or by key head, and a third pass adds key heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import AT_LEAST, INTERPRETED, capped, cdiv, power, product, quick

LOG2E = tl.constexpr(1.4426950408889634)
TOKENS = 256  # of a program that adds key heads


def attend_apart(
    queries: Tensor,
    turned: Tensor,
    far: Callable[[], tuple[Tensor, Tensor]] | None,
    near: tuple[Tensor, Tensor],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    band: int = 0,
    before: Tensor | None = None,
    per_head: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As the reference's. queries, turned: of any strides but the last, which is 1; so are near heads"""
    (heads, w, dim), (keys, values) = queries.shape, near
    kv_heads, n, wide = values.shape
    keys, values = (t if t.stride(1) == t.shape[2] else t.contiguous() for t in (keys, values))
    far_keys, far_values = near if far is None else (t.contiguous() for t in far())
    m = 0 if far is None else far_keys.shape[1]
    output = torch.empty(heads, w, wide, dtype=queries.dtype, device=queries.device)
    sums = torch.empty(heads, w, dtype=torch.float32, device=queries.device)
    sizes = max(AT_LEAST, power(dim)), max(AT_LEAST, power(wide))
    block, tokens = _blocks(max(sizes), keys.dtype)
    _attend[cdiv(w, block), heads](
        queries, turned, far_keys, far_values, keys, values, sums if sinks is None else sinks, output, sums, m, n, w,
        heads // kv_heads, dim, wide, *queries.stride()[:2], *turned.stride()[:2], keys.stride(0), values.stride(0),
        scale, softcap or 0.0, softcap is not None, sinks is not None, INTERPRETED, *sizes, block, tokens,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if not band:
        return output, None
    had = 0 if before is None else before.shape[-1]
    rows = heads if per_head else kv_heads
    parts = torch.empty(rows, n, dtype=torch.float32, device=queries.device)
    _banded[cdiv(n, tokens), rows](
        queries, keys, sums, parts, before if had else parts, n, w, had, heads // kv_heads, dim, band,
        *queries.stride()[:2], keys.stride(0), before.stride(0) if had else 0, scale, softcap or 0.0, per_head,
        softcap is not None, INTERPRETED, sizes[0], block, tokens, num_warps=4, num_stages=2,
    )  # fmt: skip
    if per_head:
        return output, parts
    mass = torch.empty(n, dtype=torch.float32, device=queries.device)
    _added[cdiv(n, TOKENS),](parts, before if had else parts, mass, n, had, kv_heads, TOKENS, num_warps=4)
    return output, mass


def _blocks(dim: int, kind: torch.dtype) -> tuple[int, int]:
    """Queries and keys at a time: what fits."""
    if kind == torch.float32:
        return (64, 32) if dim <= 128 else (32, 32)
    return (64, 64) if dim <= 128 else (64, 32)


@quick
@triton.jit(do_not_specialize=["m", "n", "w"])
def _attend(
    queries, turned, far_keys, far_values, keys, values, sinks, output, sums, m, n, w, group, dim, wide, q_head, q_step,
    t_head, t_step, k_head, v_head, scale, softcap, CAPPED: tl.constexpr, SUNK: tl.constexpr, WIDEN: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    asks, channels, wides = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, DIM), tl.arange(0, WIDE)
    inside = (asks < w)[:, None] & (channels < dim)[None, :]
    theirs = head // group
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, WIDE], tl.float32)

    a = tl.load(turned + head * t_head + asks[:, None] * t_step + channels[None, :], mask=inside, other=0.0)
    last = asks * 0 + (m - 1)  # the last key that each may see
    for start in range(0, m, KEYS):
        largest, total, result = _met(
            a, far_keys + theirs * m * dim, far_values + theirs * m * wide, start, m, last, largest, total, result,
            dim, wide, scale, softcap, CAPPED, WIDEN, DIM, WIDE, KEYS,
        )  # fmt: skip
    a = tl.load(queries + head * q_head + asks[:, None] * q_step + channels[None, :], mask=inside, other=0.0)
    last = n - w + asks
    for start in range(0, tl.minimum(n, n - w + (block + 1) * QUERIES), KEYS):
        largest, total, result = _met(
            a, keys + theirs * k_head, values + theirs * v_head, start, n, last, largest, total, result,
            dim, wide, scale, softcap, CAPPED, WIDEN, DIM, WIDE, KEYS,
        )  # fmt: skip
    if SUNK:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        most = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - most)
        total, result, largest = total * shrink + tl.exp2(sink - most), result * shrink[:, None], most
    result = result / total[:, None]
    there = output + (head * w + asks[:, None]) * wide + wides[None, :]
    tl.store(there, result.to(output.dtype.element_ty), mask=(asks < w)[:, None] & (wides < wide)[None, :])
    tl.store(sums + head * w + asks, largest + tl.log2(total), mask=asks < w)


@triton.jit
def _met(
    a, keys, values, start, end, last, largest, total, result, dim, wide, scale, softcap,
    CAPPED: tl.constexpr, WIDEN: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A block of keys more. Exponents are to the base of 2."""
    tokens, channels, wides = start + tl.arange(0, KEYS), tl.arange(0, DIM), tl.arange(0, WIDE)
    inside = (tokens < end)[:, None] & (channels < dim)[None, :]
    k = tl.load(keys + tokens[:, None] * dim + channels[None, :], mask=inside, other=0.0)
    logits = capped(product(a, tl.trans(k), WIDEN) * scale, softcap, CAPPED) * LOG2E
    logits = tl.where(tokens[None, :] <= last[:, None], logits, float("-inf"))
    newest = tl.maximum(largest, tl.max(logits, 1))  # everybody sees the first key, so it is a number
    chances = tl.exp2(logits - newest[:, None])
    shrink = tl.exp2(largest - newest)
    inside = (tokens < end)[:, None] & (wides < wide)[None, :]
    v = tl.load(values + tokens[:, None] * wide + wides[None, :], mask=inside, other=0.0)
    result = result * shrink[:, None] + product(chances.to(v.dtype), v, WIDEN)
    return newest, total * shrink + tl.sum(chances, 1), result


@quick
@triton.jit(do_not_specialize=["n", "w", "had", "band", "b_head"])
def _banded(
    queries, keys, sums, parts, before, n, w, had, group, dim, band, q_head, q_step, k_head, b_head, scale, softcap,
    EACH: tl.constexpr, CAPPED: tl.constexpr, WIDEN: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """A program takes a block of keys, and the queries of one head (EACH) or of all heads of one key head."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if EACH:
        head, asker, askers = row // group, row, 1
    else:
        head, asker, askers = row, row * group, group
    tokens, channels = block * KEYS + tl.arange(0, KEYS), tl.arange(0, DIM)
    inside = (tokens < n)[:, None] & (channels < dim)[None, :]
    k = tl.trans(tl.load(keys + head * k_head + tokens[:, None] * dim + channels[None, :], mask=inside, other=0.0))
    first = tl.maximum(block * KEYS - (n - w) + 1, 0) // QUERIES * QUERIES
    end = tl.minimum(w, (block + 1) * KEYS - (n - w) + band)  # queries from here on are too far behind
    votes = tl.zeros([QUERIES, KEYS], tl.float32)  # added up at the end: threads need not meet before
    for member in range(0, askers):
        mine = asker + member
        for start in range(first, end, QUERIES):
            asks = start + tl.arange(0, QUERIES)
            real = (asks < w)[:, None] & (channels < dim)[None, :]
            a = tl.load(queries + mine * q_head + asks[:, None] * q_step + channels[None, :], mask=real, other=0.0)
            below = tl.load(sums + mine * w + asks, mask=asks < w, other=float("inf"))
            logits = capped(product(a, k, WIDEN) * scale, softcap, CAPPED) * LOG2E
            behind = (n - w + asks)[:, None] - tokens[None, :]
            close = (behind > 0) & (behind <= band)
            votes += tl.where(close, tl.exp2(logits - below[:, None]), 0.0)
    got = tl.sum(votes, 0)
    if EACH:
        got += tl.load(before + row * b_head + tokens, mask=tokens < had, other=0.0)
    else:
        got = got / (tl.num_programs(1) * group)
    tl.store(parts + row * n + tokens, got, mask=tokens < n)


@quick
@triton.jit(do_not_specialize=["n", "had"])
def _added(parts, before, mass, n, had, kv_heads, TOKENS: tl.constexpr):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    total = tl.load(before + tokens, mask=tokens < had, other=0.0)
    for head in range(0, kv_heads):
        total += tl.load(parts + head * n + tokens, mask=tokens < n, other=0.0)
    tl.store(mass + tokens, total, mask=tokens < n)
