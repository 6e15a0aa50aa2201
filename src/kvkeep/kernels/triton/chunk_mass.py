"""Attention each key receives from the queries of its own chunk (Compactor), without a matrix of queries × keys.

A program has a chunk's keys as one tile, and takes the queries of all heads of their group, some at a time: a query's
softmax is over one tile, so there is one pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.column_mass import LOG2E
from kvkeep.kernels.triton.common import INTERPRETED, MIN_BLOCK, cdiv, dot, fast_launch, pow2

LOGITS = 2**14  # queries × keys at a time: what the registers of 8 warps hold twice
QUERIES = 64  # at a time, at most


def chunk_mass(queries: Tensor, keys: Tensor, size: int) -> Tensor:
    """As in the reference, for chunks whose keys fit into shared memory, and last strides of 1"""
    (heads, m, dim), kv_heads = queries.shape, len(keys)
    received, tile = keys.new_empty(kv_heads, m, dtype=torch.float32), max(MIN_BLOCK, pow2(size))
    block = max(MIN_BLOCK, min(QUERIES, LOGITS // tile, tile))
    _chunk_mass[m // size, kv_heads](
        queries, keys, received, m, size, *queries.stride()[:2], *keys.stride()[:2], heads // kv_heads, dim,
        cdiv(size, block), INTERPRETED or keys.dtype == torch.float32, max(MIN_BLOCK, pow2(dim)), block, tile,
        num_warps=8 if tile * block >= LOGITS else 4, num_stages=2 if tile * dim * keys.element_size() <= 2**16 else 1,
    )  # fmt: skip
    return received


@fast_launch
@triton.jit(do_not_specialize=["m"])
def _chunk_mass(
    queries, keys, received, m, size, query_head, query_token, key_head, key_token, group, dim, blocks,
    WIDEN: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, channels = tl.arange(0, KEYS), tl.arange(0, DIM)
    first, valid = chunk.to(tl.int64) * size, tokens < size
    k = tl.trans(tl.load(
        keys + head.to(tl.int64) * key_head + (first + tokens)[:, None] * key_token + channels[None, :],
        mask=valid[:, None] & (channels < dim)[None, :], other=0.0,
    ))  # fmt: skip
    sums = tl.zeros([QUERIES, KEYS], tl.float32)  # reduced at the end: no synchronization before
    for step in range(0, group * blocks):
        query_ids = step % blocks * QUERIES + tl.arange(0, QUERIES)
        there = query_ids < size
        mine = queries + (head * group + step // blocks).to(tl.int64) * query_head
        query = tl.load(
            mine + (first + query_ids)[:, None] * query_token + channels[None, :],
            mask=there[:, None] & (channels < dim)[None, :], other=0.0,
        )  # fmt: skip
        logits = tl.where(valid[None, :], dot(query, k, WIDEN) * LOG2E, float("-inf"))
        probs = tl.exp2(logits - tl.max(logits, 1)[:, None])
        sums += probs * tl.where(there, 1 / tl.sum(probs, 1), 0.0)[:, None]
    where = received + head.to(tl.int64) * m + first + tokens
    tl.store(where, tl.sum(sums, 0) / group, mask=valid)
