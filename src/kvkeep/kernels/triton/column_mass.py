"""Attention each key receives, summed over a window of queries or a whole prompt (H2O).

Two passes over the keys, neither with a matrix of queries × keys: the first finds every query's log-sum-exp (unless
the attention kernel returned it), the second sums, per block of keys, the probabilities of all queries that see them.

`chunk_mass`, from the queries of a key's own chunk alone (Compactor): a program has a chunk's keys as one tile, and
takes the queries of all heads of their group, some at a time: a query's softmax is over one tile, so there is one pass.

`repeated_attention`, the most from any query of a chunk that is read a second time (echo) or fed again (KVzip): the
log-sum-exps are of both readings, and the second pass takes, per block of keys, the largest probability of all queries
or of those near them; or a norm of these probabilities.
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
REPEATED = 64  # queries and keys of a program of `repeated_attention`


def column_mass(queries, keys, positions, seq_len, scale, softcap=None, sink_logits=None, weights=None, lse=None):
    """Do what the reference does."""
    heads, q, dim = queries.shape
    kv_heads, n, _ = keys.shape
    if not q:
        return floats(queries, kv_heads, n).zero_()
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


def repeated_attention(
    queries, keys, sinks, own_queries, own_keys, scale, softcap=None, sink_logits=None, near=None, key_weights=None,
    query_weights=None, norm=0,
):  # fmt: skip
    """Do what the reference does."""
    parts = queries, keys, own_queries, own_keys
    queries, keys, own_queries, own_keys = (t if t.stride(-1) == 1 else t.contiguous() for t in parts)
    lse = _log_sums(queries, keys, sinks, own_queries, own_keys, scale, softcap, sink_logits)
    if query_weights is not None:
        lse = lse - query_weights.log()
    near = queries.shape[1] + keys.shape[1] if near is None else near
    return _maximum(queries, keys, lse, scale, softcap, near, key_weights, norm)


def _log_sums(queries, keys, sinks, own_queries, own_keys, scale, softcap, sink_logits):
    """Log-sum-exp of every query over sinks and keys, and, as `own_queries`, over its own tokens' keys up to itself."""
    before, q = torch.cat([sinks, keys], 1), queries.shape[1]
    kv_heads, n, _ = before.shape
    places = torch.arange(max(q, n), dtype=torch.int32, device=keys.device)
    everywhere = torch.zeros_like(places[:n]).expand(kv_heads, -1)
    text = log_sum_exp(queries, before, everywhere, q + n, scale, softcap, sink_logits)
    own = log_sum_exp(own_queries, own_keys, places[:q].expand(kv_heads, -1), q, scale, softcap)
    return torch.logaddexp(text, own)


def _maximum(
    queries: Tensor,
    keys: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    near: int,
    weights: Tensor | None,
    norm: int,
) -> Tensor:
    """Take the maximum over all queries of tokens at most `near` from a key; the last m are of the keys' tokens.

    queries [heads, q, dim], keys [kv_heads, m, dim], weights [heads, m]: factors of the attention to each key
    """
    (heads, q, dim), (kv_heads, m, _) = queries.shape, keys.shape
    highest = floats(queries, kv_heads, m)
    log_weights = None if weights is None else weights.float().log().contiguous()
    _column_maximum[cdiv(m, REPEATED), kv_heads](
        queries, keys, lse, log_weights, highest, q, m, near, *queries.stride()[:2], *keys.stride()[:2],
        heads // kv_heads, dim, scale, softcap, norm, padded(dim), REPEATED, REPEATED, num_warps=4, num_stages=2,
    )  # fmt: skip
    return highest


@kernel(do_not_specialize=["q", "m", "near"])
def _column_maximum(
    queries, keys, lse, log_weights, highest, q, m, near, query_head, query_token, key_head, key_token, group, dim,
    scale, softcap, NORM: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    tokens = block * KEYS + tl.arange(0, KEYS)
    valid = tokens < m
    k = load_rows(keys + head.to(tl.int64) * key_head + tokens.to(tl.int64) * key_token, valid, dim, DIM)
    k = tl.trans(k)
    # reduced at the end: no synchronization before
    total = tl.zeros([QUERIES, KEYS], tl.float32) if NORM else tl.full([QUERIES, KEYS], float("-inf"), tl.float32)
    same = q - m  # the query of the first key's token
    first, last = tl.maximum(0, same + block * KEYS - near), tl.minimum(q, same + (block + 1) * KEYS + near)
    for member in range(0, group):
        offset = (head * group + member).to(tl.int64)
        weight = tl.zeros([KEYS], tl.float32)
        if log_weights is not None:
            weight = tl.load(log_weights + offset * m + tokens, mask=valid, other=0.0)
        for start in range(first, last, QUERIES):
            query_ids = start + tl.arange(0, QUERIES)
            there = query_ids < q
            query = load_rows(queries + offset * query_head + query_ids.to(tl.int64) * query_token, there, dim, DIM)
            query_lse = tl.load(lse + offset * q + query_ids, mask=there, other=float("inf"))
            logits = attention_logits(query, k, scale, softcap)
            far = tl.abs(query_ids[:, None] - same - tokens[None, :]) > near
            log_share = tl.where(far, float("-inf"), logits - query_lse[:, None] + weight[None, :]) * LOG2E
            if NORM:
                total += tl.exp2(log_share * NORM)
            else:
                total = tl.maximum(total, log_share)
    result = tl.sum(total, 0) if NORM else tl.exp2(tl.max(total, 0))
    if NORM == 2:
        result = tl.sqrt(result)
    tl.store(highest + head * m + tokens, result, mask=valid)
