"""Attention each key gets from all queries, summed: the votes of a window, or of a whole prompt (H2O).

Two passes over the keys, neither of which holds a matrix of queries × keys: the first finds every query's
log-sum-exp (attention that ran before may have left it), the second sums, for a block of keys, the chances of all
queries that can see them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import AT_LEAST, INTERPRETED, capped, cdiv, power, product

PROGRAMS = 512  # enough to fill a large GPU
LOG2E = tl.constexpr(1.4426950408889634)


def column_mass(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    cursor: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    weights: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    """As the reference's.

    queries [heads, q, dim], keys [kv_heads, n, dim], positions [kv_heads, n] -> [kv_heads, n] float32
    weights, sums [heads, q]
    """
    heads, q, dim = queries.shape
    kv_heads, n, _ = keys.shape
    queries, keys, positions = queries.contiguous(), keys.contiguous(), positions.contiguous()
    if sums is None:
        sums = log_sums(queries, keys, positions, cursor, scale, softcap)
        if sinks is not None:
            sums = torch.logaddexp(sums, sinks.float()[:, None])
    sums = sums.masked_fill(sums == -torch.inf, torch.inf).contiguous()  # sees nothing, and votes for nothing
    mass = queries.new_empty(kv_heads, n, dtype=torch.float32)
    size, warps, stages = _blocks(q, dim, queries.dtype)
    _columns[cdiv(n, size), kv_heads](
        queries, keys, positions, sums, sums if weights is None else weights.float().contiguous(), mass, cursor - q, q,
        n, heads // kv_heads, dim, scale, softcap or 0.0, softcap is not None, weights is not None, cursor == n,
        INTERPRETED, max(AT_LEAST, power(dim)), size, size, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return mass


def log_sums(
    queries: Tensor, keys: Tensor, positions: Tensor, cursor: int, scale: float, softcap: float | None
) -> Tensor:
    """Log-sum-exp of every query's logits; -inf where it sees nothing. All contiguous -> [heads, q] float32"""
    heads, q, dim = queries.shape
    kv_heads, n, _ = keys.shape
    size, warps, stages = _blocks(q, dim, queries.dtype)
    blocks = cdiv(q, size)
    splits = max(1, min(cdiv(n, 4 * size), PROGRAMS // (blocks * heads)))
    parts = queries.new_empty(splits, heads, q, dtype=torch.float32)
    _sums[blocks, heads, splits](
        queries, keys, positions, parts, cursor - q, q, n, heads // kv_heads, dim, scale, softcap or 0.0, splits,
        softcap is not None, cursor == n, INTERPRETED, max(AT_LEAST, power(dim)), size, size,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return parts[0] if splits == 1 else parts.logsumexp(0)


def _blocks(q: int, dim: int, kind: torch.dtype) -> tuple[int, int, int]:
    """Queries and keys at a time, warps, and stages of loading."""
    large = q >= 256 and dim <= 128 and kind != torch.float32 and not INTERPRETED
    return (128, 8, 3) if large else (64, 4, 2)


@triton.jit
def _sums(
    queries, keys, positions, parts, before, q, n, group, dim, scale, softcap, splits,
    CAPPED: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    asks, channels = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, DIM)
    base = queries + head.to(tl.int64) * q * dim
    inside = (asks < q)[:, None] & (channels < dim)[None, :]
    a = tl.load(base + asks[:, None].to(tl.int64) * dim + channels[None, :], mask=inside, other=0.0)
    key_base = keys + (head // group).to(tl.int64) * n * dim
    stood = positions + (head // group) * n
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    end = n
    if EVEN:  # no key stands before its number, so later ones are too new
        end = tl.minimum(n, before + (block + 1) * QUERIES)
    stretch = tl.cdiv(tl.cdiv(end, splits), KEYS) * KEYS
    for start in range(split * stretch, tl.minimum(split * stretch + stretch, end), KEYS):
        tokens = start + tl.arange(0, KEYS)
        real = tokens < n
        k = tl.load(
            key_base + tokens[:, None].to(tl.int64) * dim + channels[None, :],
            mask=real[:, None] & (channels < dim)[None, :], other=0.0,
        )  # fmt: skip
        where = tl.load(stood + tokens, mask=real, other=2147483647)
        logits = capped(product(a, tl.trans(k), WIDEN) * scale, softcap, CAPPED)
        logits = tl.where(where[None, :] <= (before + asks)[:, None], logits, float("-inf"))
        newest = tl.maximum(largest, tl.max(logits, 1))
        safe = tl.where(newest == float("-inf"), 0.0, newest)
        total = total * tl.exp(largest - safe) + tl.sum(tl.exp(logits - safe[:, None]), 1)
        largest = newest
    result = tl.where(total == 0, float("-inf"), largest + tl.log(tl.where(total == 0, 1.0, total)))
    tl.store(parts + (split * tl.num_programs(1) + head).to(tl.int64) * q + asks, result, mask=asks < q)


@triton.jit
def _columns(
    queries, keys, positions, sums, weights, mass, before, q, n, group, dim, scale, softcap,
    CAPPED: tl.constexpr, WEIGHED: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    tokens, channels = block * KEYS + tl.arange(0, KEYS), tl.arange(0, DIM)
    real = tokens < n
    key_base = keys + head.to(tl.int64) * n * dim
    k = tl.trans(tl.load(
        key_base + tokens[:, None].to(tl.int64) * dim + channels[None, :],
        mask=real[:, None] & (channels < dim)[None, :], other=0.0,
    ))  # fmt: skip
    where = tl.load(positions + head * n + tokens, mask=real, other=2147483647)
    first = tl.maximum(tl.min(where, 0) - before, 0) // QUERIES * QUERIES  # earlier queries see none of these
    late = q
    if EVEN:  # a head that dropped nothing: later queries see all of them
        whole = tl.load(positions + head * n + n - 1) == n - 1
        after = tl.maximum(first, tl.cdiv((block + 1) * KEYS - 1 - before, QUERIES) * QUERIES)
        late = tl.where(whole, tl.minimum(q, after), q)
    votes = tl.zeros([QUERIES, KEYS], tl.float32)  # added up at the end: threads need not meet before
    for member in range(0, group):
        mine = (head * group + member).to(tl.int64) * q
        for start in range(first, late, QUERIES):
            chances = _chances(
                queries + mine * dim, sums + mine, weights + mine, k, channels, start, q, dim, scale, softcap,
                CAPPED, WEIGHED, WIDEN, QUERIES,
            )  # fmt: skip
            asks = start + tl.arange(0, QUERIES)
            votes += tl.where(where[None, :] <= (before + asks)[:, None], chances, 0.0)
        for start in range(late, q, QUERIES):
            votes += _chances(
                queries + mine * dim, sums + mine, weights + mine, k, channels, start, q, dim, scale, softcap,
                CAPPED, WEIGHED, WIDEN, QUERIES,
            )  # fmt: skip
    tl.store(mass + head * n + tokens, tl.sum(votes, 0) / group, mask=real)


@triton.jit
def _chances(
    queries, sums, weights, k, channels, start, q, dim, scale, softcap,
    CAPPED: tl.constexpr, WEIGHED: tl.constexpr, WIDEN: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """What a block of queries gives to a block of keys, whether it may see them or not. k [dim, keys]"""
    asks = start + tl.arange(0, QUERIES)
    inside = (asks < q)[:, None] & (channels < dim)[None, :]
    a = tl.load(queries + asks[:, None].to(tl.int64) * dim + channels[None, :], mask=inside, other=0.0)
    below = tl.load(sums + asks, mask=asks < q, other=float("inf"))
    if CAPPED:
        chances = tl.exp(capped(product(a, k, WIDEN) * scale, softcap, CAPPED) - below[:, None])
    else:
        chances = tl.exp2(product(a, k, WIDEN) * (scale * LOG2E) - (below * LOG2E)[:, None])
    if WEIGHED:
        chances *= tl.load(weights + asks, mask=asks < q, other=0.0)[:, None]
    return chances
