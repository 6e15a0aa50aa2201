"""Attention of a window of queries over retrieved (far) and near keys: one softmax, no matrix of queries × keys.

A program takes one head and a block of its queries through all far keys, then through the near ones it can see, and
writes each query's log-sum-exp. If the attention that near keys receive is wanted, a second pass over near keys sums
the probabilities of the next queries, by query head or by KV head, and a third pass sums KV heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvkeep.kernels.triton.common import cdiv, floats, kernel, padded
from kvkeep.kernels.triton.tiles import LOG2E, attention_logits, dot, load_rows, no_keys, store_rows

TOKENS = 256  # per program that sums KV heads


def two_region_attention(
    queries, rotated, far, near, scale, softcap=None, sink_logits=None, band=0, prior_mass=None, per_head=False
):
    """Do what the reference does. The last stride of queries and rotated is 1"""
    (heads, w, dim), (keys, values) = queries.shape, near
    kv_heads, n, v_dim = values.shape
    keys, values = (t if t.stride(1) == t.shape[2] else t.contiguous() for t in (keys, values))
    far_keys, far_values = near if far is None else (t.contiguous() for t in far())
    m = 0 if far is None else far_keys.shape[1]
    output = torch.empty(heads, w, v_dim, dtype=queries.dtype, device=queries.device)
    lse = floats(queries, heads, w)
    sizes = padded(dim), padded(v_dim)
    block, tokens = _blocks(max(sizes), keys.dtype)
    _attention[cdiv(w, block), heads](
        queries, rotated, far_keys, far_values, keys, values, sink_logits, output, lse, m, n, w, heads // kv_heads, dim,
        v_dim, *queries.stride()[:2], *rotated.stride()[:2], keys.stride(0), values.stride(0), scale, softcap, *sizes,
        block, tokens, num_warps=4, num_stages=2,
    )  # fmt: skip
    if not band:
        return output, None
    num_prior = 0 if prior_mass is None else prior_mass.shape[-1]
    rows = heads if per_head else kv_heads
    parts = floats(queries, rows, n)
    prior = parts if prior_mass is None or not num_prior else prior_mass
    _band_mass[cdiv(n, tokens), rows](
        queries, keys, lse, parts, prior, n, w, num_prior, heads // kv_heads, dim, band, *queries.stride()[:2],
        keys.stride(0), prior.stride(0) if num_prior else 0, scale, softcap, per_head, sizes[0], block, tokens,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if per_head:
        return output, parts
    mass = floats(queries, n)
    _sum_heads[cdiv(n, TOKENS),](parts, prior, mass, n, num_prior, kv_heads, TOKENS, num_warps=4)
    return output, mass


def _blocks(dim: int, kind: torch.dtype) -> tuple[int, int]:
    """Queries and keys per block: what fits in shared memory."""
    if kind == torch.float32:
        return (64, 32) if dim <= 128 else (32, 32)
    return (64, 64) if dim <= 128 else (64, 32)


@kernel(do_not_specialize=["m", "n", "w"])
def _attention(
    queries, rotated, far_keys, far_values, keys, values, sink_logits, output, lse, m, n, w, group, dim, v_dim,
    q_head, q_step, r_head, r_step, k_head, v_head, scale, softcap, DIM: tl.constexpr, V_DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    query_ids = block * QUERIES + tl.arange(0, QUERIES)
    there, kv_head = query_ids < w, head // group
    row_max, row_sum, result = no_keys(QUERIES, V_DIM)

    query = load_rows(rotated + head * r_head + query_ids * r_step, there, dim, DIM)
    last = query_ids * 0 + (m - 1)  # the last key each query sees
    for start in range(0, m, KEYS):
        row_max, row_sum, result = _attend_block(
            query, far_keys + kv_head * m * dim, far_values + kv_head * m * v_dim, start, m, last, row_max, row_sum,
            result, dim, v_dim, scale, softcap, DIM, V_DIM, KEYS,
        )  # fmt: skip
    query = load_rows(queries + head * q_head + query_ids * q_step, there, dim, DIM)
    last = n - w + query_ids
    for start in range(0, tl.minimum(n, n - w + (block + 1) * QUERIES), KEYS):
        row_max, row_sum, result = _attend_block(
            query, keys + kv_head * k_head, values + kv_head * v_head, start, n, last, row_max, row_sum, result,
            dim, v_dim, scale, softcap, DIM, V_DIM, KEYS,
        )  # fmt: skip
    if sink_logits is not None:
        sink = tl.load(sink_logits + head).to(tl.float32) * LOG2E
        new_max = tl.maximum(row_max, sink)
        rescale = tl.exp2(row_max - new_max)
        row_sum, result, row_max = row_sum * rescale + tl.exp2(sink - new_max), result * rescale[:, None], new_max
    store_rows(output + (head * w + query_ids) * v_dim, result / row_sum[:, None], there, v_dim, V_DIM)
    tl.store(lse + head * w + query_ids, row_max + tl.log2(row_sum), mask=there)


@triton.jit
def _attend_block(
    query, keys, values, start, end, last, row_max, row_sum, result, dim, v_dim, scale, softcap, DIM: tl.constexpr,
    V_DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the online softmax, in base 2."""
    tokens = start + tl.arange(0, KEYS)
    k = load_rows(keys + tokens * dim, tokens < end, dim, DIM)
    logits = attention_logits(query, tl.trans(k), scale, softcap) * LOG2E
    logits = tl.where(tokens[None, :] <= last[:, None], logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1))  # finite, as every query sees the first key
    probs = tl.exp2(logits - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    v = load_rows(values + tokens * v_dim, tokens < end, v_dim, V_DIM)
    result = result * rescale[:, None] + dot(probs.to(v.dtype), v)
    return new_max, row_sum * rescale + tl.sum(probs, 1), result


@kernel(do_not_specialize=["n", "w", "num_prior", "band", "p_head"])
def _band_mass(
    queries, keys, lse, parts, prior_mass, n, w, num_prior, group, dim, band, q_head, q_step, k_head, p_head, scale,
    softcap, PER_HEAD: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A program takes a block of keys and the queries of one head (PER_HEAD) or of one KV head's group."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PER_HEAD:
        head, first_head, num_heads = row // group, row, 1
    else:
        head, first_head, num_heads = row, row * group, group
    tokens = block * KEYS + tl.arange(0, KEYS)
    k = tl.trans(load_rows(keys + head * k_head + tokens * dim, tokens < n, dim, DIM))
    first = tl.maximum(block * KEYS - (n - w) + 1, 0) // QUERIES * QUERIES
    end = tl.minimum(w, (block + 1) * KEYS - (n - w) + band)  # later queries are beyond the band
    received = tl.zeros([QUERIES, KEYS], tl.float32)  # reduced at the end: no synchronization before
    for member in range(0, num_heads):
        q_index = first_head + member
        for start in range(first, end, QUERIES):
            query_ids = start + tl.arange(0, QUERIES)
            query = load_rows(queries + q_index * q_head + query_ids * q_step, query_ids < w, dim, DIM)
            query_lse = tl.load(lse + q_index * w + query_ids, mask=query_ids < w, other=float("inf"))
            logits = attention_logits(query, k, scale, softcap) * LOG2E
            distance = (n - w + query_ids)[:, None] - tokens[None, :]
            in_band = (distance > 0) & (distance <= band)
            received += tl.where(in_band, tl.exp2(logits - query_lse[:, None]), 0.0)
    total = tl.sum(received, 0)
    if PER_HEAD:
        total += tl.load(prior_mass + row * p_head + tokens, mask=tokens < num_prior, other=0.0)
    else:
        total = total / (tl.num_programs(1) * group)
    tl.store(parts + row * n + tokens, total, mask=tokens < n)


@kernel(do_not_specialize=["n", "num_prior"])
def _sum_heads(parts, prior_mass, mass, n, num_prior, kv_heads, TOKENS: tl.constexpr):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    total = tl.load(prior_mass + tokens, mask=tokens < num_prior, other=0.0)
    for head in range(0, kv_heads):
        total += tl.load(parts + head * n + tokens, mask=tokens < n, other=0.0)
    tl.store(mass + tokens, total, mask=tokens < n)
