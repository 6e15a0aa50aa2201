"""The most attention each key gets from any query of a chunk that is read a second time (echo), or fed again (KVzip).

Two passes, neither with a matrix of queries × keys: log-sum-exps of both readings (column_mass.py), then, per block of
keys, the largest probability of all queries, or of those near them; or a norm of these probabilities.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.column_mass import log_sum_exp
from kvkeep.kernels.triton.common import cdiv, floats, kernel, padded
from kvkeep.kernels.triton.tiles import LOG2E, attention_logits, load_rows

BLOCK = 64  # queries and keys


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
    _column_maximum[cdiv(m, BLOCK), kv_heads](
        queries, keys, lse, log_weights, highest, q, m, near, *queries.stride()[:2], *keys.stride()[:2],
        heads // kv_heads, dim, scale, softcap, norm, padded(dim), BLOCK, BLOCK, num_warps=4, num_stages=2,
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
