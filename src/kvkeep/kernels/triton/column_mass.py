"""Attention each key receives, summed over a window of queries or a whole prompt (H2O).

Two passes over the keys, neither with a matrix of queries × keys: the first finds every query's log-sum-exp (unless
the attention kernel returned it), the second sums, per block of keys, the probabilities of all queries that see them.

`chunk_mass`, from the queries of a key's own chunk alone (Compactor): a program has a chunk's keys as one tile, and
takes the queries of all heads of their group, some at a time: a query's softmax is over one tile, so there is one pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import INTERPRETED, MIN_BLOCK, cdiv, floats, kernel, padded
from kvkeep.kernels.triton.tiles import LOG2E, attention_logits, dot, load_rows, softcapped

PROGRAMS = 512  # enough to fill a large GPU
ROWS = 128  # queries of a program that merges


def column_mass(queries, keys, positions, seq_len, scale, softcap=None, sink_logits=None, weights=None, lse=None):
    """Do what the reference does."""
    heads, q, dim = queries.shape
    kv_heads, n, _ = keys.shape
    queries, keys, positions = (_dense_last_axis(t) for t in (queries, keys, positions))
    if lse is None:
        lse = log_sum_exp(queries, keys, positions, seq_len, scale, softcap, sink_logits)
    else:
        lse = lse.masked_fill(lse == -torch.inf, torch.inf).contiguous()
    mass = floats(queries, kv_heads, n)
    size, warps, stages = _blocks(q, dim, queries.dtype)
    _column_mass[cdiv(n, size), kv_heads](
        queries, keys, positions, lse, None if weights is None else weights.float().contiguous(), mass, seq_len - q, q,
        n, *queries.stride()[:2], *keys.stride()[:2], positions.stride(0), heads // kv_heads, dim, scale, softcap,
        seq_len == n, padded(dim), size, size, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return mass


def log_sum_exp(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    seq_len: int,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Log-sum-exp of every query's logits; inf, so that it adds nothing, for a query whose keys are all masked.

    Last strides are 1. -> [heads, q] float32
    """
    heads, q, dim = queries.shape
    kv_heads, n, _ = keys.shape
    size, warps, stages = _blocks(q, dim, queries.dtype)
    blocks = cdiv(q, size)
    splits = max(1, min(cdiv(n, 4 * size), PROGRAMS // (blocks * heads)))
    parts = floats(queries, splits, heads, q)
    _log_sum_exp[blocks, heads, splits](
        queries, keys, positions, parts, seq_len - q, q, n, *queries.stride()[:2], *keys.stride()[:2],
        positions.stride(0), heads // kv_heads, dim, scale, softcap, splits, seq_len == n, padded(dim), size, size,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    lse = floats(queries, heads, q)
    merge[heads, cdiv(q, ROWS)](parts, sink_logits, lse, heads, q, splits, ROWS, num_warps=4)
    return lse


def _dense_last_axis(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _blocks(q: int, dim: int, kind: torch.dtype) -> tuple[int, int, int]:
    """Queries and keys per block, warps, pipeline stages."""
    large = q >= 256 and dim <= 128 and kind != torch.float32 and not INTERPRETED
    return (128, 8, 3) if large else (64, 4, 2)


@kernel(do_not_specialize=["before", "q", "n", "position_head", "splits"])
def _log_sum_exp(
    queries, keys, positions, parts, before, q, n, query_head, query_token, key_head, key_token, position_head,
    group, dim, scale, softcap, splits, DENSE: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_ids = block * QUERIES + tl.arange(0, QUERIES)
    base = queries + head.to(tl.int64) * query_head
    query = load_rows(base + query_ids.to(tl.int64) * query_token, query_ids < q, dim, DIM)
    key_base = keys + (head // group).to(tl.int64) * key_head
    key_positions = positions + (head // group) * position_head
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    end = n
    if DENSE:  # positions are at least the index, so later keys are masked
        end = tl.minimum(n, before + (block + 1) * QUERIES)
    split_tokens = tl.cdiv(tl.cdiv(end, splits), KEYS) * KEYS
    for start in range(split * split_tokens, tl.minimum(split * split_tokens + split_tokens, end), KEYS):
        tokens = start + tl.arange(0, KEYS)
        valid = tokens < n
        k = load_rows(key_base + tokens.to(tl.int64) * key_token, valid, dim, DIM)
        position = tl.load(key_positions + tokens, mask=valid, other=2147483647)
        logits = attention_logits(query, tl.trans(k), scale, softcap)
        logits = tl.where(position[None, :] <= (before + query_ids)[:, None], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        safe = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp(row_max - safe) + tl.sum(tl.exp(logits - safe[:, None]), 1)
        row_max = new_max
    result = tl.where(row_sum == 0, float("-inf"), row_max + tl.log(tl.where(row_sum == 0, 1.0, row_sum)))
    tl.store(parts + (split * tl.num_programs(1) + head).to(tl.int64) * q + query_ids, result, mask=query_ids < q)


@kernel(do_not_specialize=["q", "splits"])
def merge(parts, sink_logits, lse, heads, q, splits, ROWS: tl.constexpr):
    """Log-sum-exps of parts of the keys, of the heads of one row or more, become those of all keys."""
    head, rows = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for split in range(0, splits):
        where = parts + (split * tl.num_programs(0) + head) * q + rows
        part = tl.load(where, mask=rows < q, other=float("-inf"))
        row_max, row_sum = _add(part, row_max, row_sum)
    if sink_logits is not None:
        row_max, row_sum = _add(tl.load(sink_logits + head % heads).to(tl.float32), row_max, row_sum)
    total = tl.where(row_sum == 0, float("inf"), row_max + tl.log(tl.where(row_sum == 0, 1.0, row_sum)))
    tl.store(lse + head * q + rows, total, mask=rows < q)


@triton.jit
def _add(part, row_max, row_sum):
    """One more logit of a sum of exponentials."""
    new_max = tl.maximum(row_max, part)
    safe = tl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, row_sum * tl.exp(row_max - safe) + tl.exp(part - safe)


@kernel(do_not_specialize=["before", "q", "n", "position_head"])
def _column_mass(
    queries, keys, positions, lse, weights, mass, before, q, n, query_head, query_token, key_head, key_token,
    position_head, group, dim, scale, softcap, DENSE: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    tokens = block * KEYS + tl.arange(0, KEYS)
    valid = tokens < n
    k = load_rows(keys + head.to(tl.int64) * key_head + tokens.to(tl.int64) * key_token, valid, dim, DIM)
    k = tl.trans(k)
    position = tl.load(positions + head * position_head + tokens, mask=valid, other=2147483647)
    first = tl.maximum(tl.min(position, 0) - before, 0) // QUERIES * QUERIES  # earlier queries see none of these keys
    mask_end = q
    if DENSE:  # of a head without evictions, later queries see the whole block
        whole = tl.load(positions + head * position_head + n - 1) == n - 1
        after = tl.maximum(first, tl.cdiv((block + 1) * KEYS - 1 - before, QUERIES) * QUERIES)
        mask_end = tl.where(whole, tl.minimum(q, after), q)
    received = tl.zeros([QUERIES, KEYS], tl.float32)  # reduced at the end: no synchronization before
    for member in range(0, group):
        offset = (head * group + member).to(tl.int64)
        query, query_lse, weight = queries + offset * query_head, lse + offset * q, weights
        if weights is not None:
            weight = weights + offset * q
        for start in range(first, mask_end, QUERIES):
            query_ids = start + tl.arange(0, QUERIES)
            probs = _probs(query, query_lse, weight, k, query_ids, q, query_token, dim, scale, softcap, DIM)
            received += tl.where(position[None, :] <= (before + query_ids)[:, None], probs, 0.0)
        for start in range(mask_end, q, QUERIES):
            query_ids = start + tl.arange(0, QUERIES)
            received += _probs(query, query_lse, weight, k, query_ids, q, query_token, dim, scale, softcap, DIM)
    tl.store(mass + head * n + tokens, tl.sum(received, 0) / group, mask=valid)


@triton.jit
def _probs(queries, lse, weights, k, query_ids, q, query_token, dim, scale, softcap, DIM: tl.constexpr):
    """Unmasked attention of a block of queries to a block of keys. k [dim, keys]"""
    query = load_rows(queries + query_ids.to(tl.int64) * query_token, query_ids < q, dim, DIM)
    query_lse = tl.load(lse + query_ids, mask=query_ids < q, other=float("inf"))
    if softcap is not None:
        probs = tl.exp(softcapped(dot(query, k) * scale, softcap) - query_lse[:, None])
    else:
        probs = tl.exp2(dot(query, k) * (scale * LOG2E) - (query_lse * LOG2E)[:, None])
    if weights is not None:
        probs *= tl.load(weights + query_ids, mask=query_ids < q, other=0.0)[:, None]
    return probs


LOGITS = 2**14  # queries × keys at a time: what the registers of 8 warps hold twice
QUERIES = 64  # at a time, at most


def chunk_mass(queries, keys, size):
    """Do what the reference does, for chunks whose keys fit into shared memory, and last strides of 1"""
    (heads, m, dim), kv_heads = queries.shape, len(keys)
    received, tile = floats(keys, kv_heads, m), padded(size)
    block = max(MIN_BLOCK, min(QUERIES, LOGITS // tile, tile))
    _chunk_mass[m // size, kv_heads](
        queries, keys, received, m, size, *queries.stride()[:2], *keys.stride()[:2], heads // kv_heads, dim,
        cdiv(size, block), INTERPRETED or keys.dtype == torch.float32, padded(dim), block, tile,
        num_warps=8 if tile * block >= LOGITS else 4, num_stages=2 if tile * dim * keys.element_size() <= 2**16 else 1,
    )  # fmt: skip
    return received


@kernel(do_not_specialize=["m"])
def _chunk_mass(
    queries, keys, received, m, size, query_head, query_token, key_head, key_token, group, dim, blocks,
    WIDEN: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens = tl.arange(0, KEYS)
    first, valid = chunk.to(tl.int64) * size, tokens < size
    k = tl.trans(load_rows(keys + head.to(tl.int64) * key_head + (first + tokens) * key_token, valid, dim, DIM))
    sums = tl.zeros([QUERIES, KEYS], tl.float32)  # reduced at the end: no synchronization before
    for step in range(0, group * blocks):
        query_ids = step % blocks * QUERIES + tl.arange(0, QUERIES)
        there = query_ids < size
        mine = queries + (head * group + step // blocks).to(tl.int64) * query_head
        query = load_rows(mine + (first + query_ids) * query_token, there, dim, DIM)
        logits = tl.where(valid[None, :], dot(query, k, WIDEN) * LOG2E, float("-inf"))
        probs = tl.exp2(logits - tl.max(logits, 1)[:, None])
        sums += probs * tl.where(there, 1 / tl.sum(probs, 1), 0.0)[:, None]
    where = received + head.to(tl.int64) * m + first + tokens
    tl.store(where, tl.sum(sums, 0) / group, mask=valid)
