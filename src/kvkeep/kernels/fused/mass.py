"""Attention each key gets from all queries, summed: the votes of a window, or of a whole prompt (H2O).

Two passes over the keys, neither of which holds a matrix of queries × keys: the first finds every query's
log-sum-exp, the second sums, for a block of keys, the chances of all queries that can see them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.fused.common import AT_LEAST, INTERPRETED, capped, product

QUERIES, KEYS = 64, 64  # at a time


def column_mass(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    cursor: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference's.

    queries [heads, q, dim], keys [kv_heads, n, dim], positions [kv_heads, n] -> [kv_heads, n] float32
    """
    heads, q, dim = queries.shape
    kv_heads, n, _ = keys.shape
    queries, keys, positions = queries.contiguous(), keys.contiguous(), positions.contiguous()
    sums = queries.new_empty(heads, q, dtype=torch.float32)
    extra = sums if sinks is None else sinks.float().contiguous()
    wide = max(AT_LEAST, triton.next_power_of_2(dim))
    even = cursor == n  # nothing was dropped: key i stands at i
    how = (
        cursor - q,
        q,
        n,
        heads // kv_heads,
        dim,
        scale,
        softcap or 0.0,
        softcap is not None,
        even,
        INTERPRETED,
        wide,
    )
    _sums[triton.cdiv(q, QUERIES), heads](
        queries, keys, positions, extra, sums, *how, sinks is not None, QUERIES, KEYS, num_warps=4
    )
    mass = queries.new_empty(kv_heads, n, dtype=torch.float32)
    _columns[triton.cdiv(n, KEYS), kv_heads](queries, keys, positions, sums, mass, *how, QUERIES, KEYS, num_warps=4)
    return mass


@triton.jit
def _sums(
    queries, keys, positions, sinks, sums, before, q, n, group, dim, scale, softcap,
    CAPPED: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, DIM: tl.constexpr, SUNK: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    asks, channels = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, DIM)
    base = queries + head.to(tl.int64) * q * dim
    inside = (asks < q)[:, None] & (channels < dim)[None, :]
    a = tl.load(base + asks[:, None].to(tl.int64) * dim + channels[None, :], mask=inside, other=0.0)
    key_base = keys + (head // group).to(tl.int64) * n * dim
    stood = positions + (head // group) * n
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SUNK:
        largest = tl.zeros([QUERIES], tl.float32) + tl.load(sinks + head)
        total = tl.full([QUERIES], 1.0, tl.float32)
    end = n
    if EVEN:
        end = tl.minimum(n, before + (block + 1) * QUERIES)
    for start in range(0, end, KEYS):
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
    blind = total == 0  # sees nothing, and votes for nothing
    result = tl.where(blind, float("inf"), largest + tl.log(tl.where(blind, 1.0, total)))
    tl.store(sums + head * q + asks, result, mask=asks < q)


@triton.jit
def _columns(
    queries, keys, positions, sums, mass, before, q, n, group, dim, scale, softcap,
    CAPPED: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    tokens, channels = block * KEYS + tl.arange(0, KEYS), tl.arange(0, DIM)
    real = tokens < n
    key_base = keys + head.to(tl.int64) * n * dim
    k = tl.load(
        key_base + tokens[:, None].to(tl.int64) * dim + channels[None, :],
        mask=real[:, None] & (channels < dim)[None, :], other=0.0,
    )  # fmt: skip
    where = tl.load(positions + head * n + tokens, mask=real, other=2147483647)
    first = tl.maximum(tl.min(where, 0) - before, 0) // QUERIES * QUERIES  # earlier queries see none of these
    votes = tl.zeros([KEYS], tl.float32)
    for member in range(0, group):
        mine = head * group + member
        base = queries + mine.to(tl.int64) * q * dim
        for start in range(first, q, QUERIES):
            asks = start + tl.arange(0, QUERIES)
            inside = (asks < q)[:, None] & (channels < dim)[None, :]
            a = tl.load(base + asks[:, None].to(tl.int64) * dim + channels[None, :], mask=inside, other=0.0)
            below = tl.load(sums + mine * q + asks, mask=asks < q, other=float("inf"))
            logits = capped(product(a, tl.trans(k), WIDEN) * scale, softcap, CAPPED)
            seen = (where[None, :] <= (before + asks)[:, None]) & (asks < q)[:, None]
            votes += tl.sum(tl.where(seen, tl.exp(logits - below[:, None]), 0.0), 0)
    tl.store(mass + head * n + tokens, votes / group, mask=real)
