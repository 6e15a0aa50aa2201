"""Attention of several new tokens per row over a flat buffer with one segment, of any size, per row and key head: a
question about a compressed text.

A program takes a block of a row's queries, in all query heads of one key head, and goes through the segment's tokens up
to those queries' own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import INTERPRETED, MIN_BLOCK, cdiv, dot, fast_launch, pow2, softcapped

QUERIES = 64  # per program, over all heads of a group
BLOCK = 64  # tokens per iteration


def extend_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    counts: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """As in the reference."""
    (rows, heads, q, dim), kv_heads, v_dim = queries.shape, starts.shape[1], values.shape[-1]
    group, members = heads // kv_heads, pow2(heads // kv_heads)
    tokens = max(1, QUERIES // members)
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    output = queries.new_empty(rows, heads, q, v_dim)
    extra = queries if sink_logits is None else sink_logits.float().contiguous()
    _extend[cdiv(q, tokens), rows * kv_heads](
        queries, keys, values, starts.contiguous(), lengths.contiguous(), counts, extra, output, *queries.stride()[:3],
        q, kv_heads, group, dim, v_dim, scale, softcap or 0.0, softcap is not None, sink_logits is not None,
        INTERPRETED, members, tokens, max(MIN_BLOCK, pow2(dim)), max(MIN_BLOCK, pow2(v_dim)), BLOCK, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return output


@fast_launch
@triton.jit(do_not_specialize=["q", "row_stride", "head_stride", "token_stride"])
def _extend(
    queries, keys, values, starts, lengths, counts, sink_logits, output, row_stride, head_stride, token_stride, q,
    kv_heads, group, dim, v_dim, scale, softcap, CAPPED: tl.constexpr, HAS_SINK: tl.constexpr, WIDEN: tl.constexpr,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, segment = tl.program_id(0), tl.program_id(1)
    row, base = (segment // kv_heads).to(tl.int64), tl.load(starts + segment).to(tl.int64)
    length, count = tl.load(lengths + segment).to(tl.int32), tl.load(counts + row).to(tl.int32)
    places, channels, v_channels = tl.arange(0, GROUP * TOKENS), tl.arange(0, DIM), tl.arange(0, V_DIM)
    token, member = block * TOKENS + places // GROUP, places % GROUP
    head = segment % kv_heads * group + member
    there = (member < group) & (token < q)
    own = tl.where(there & (token >= q - count), length - q + token, -1)  # index of the query's own key
    where = queries + row * row_stride + head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
    query = tl.load(where[:, None] + channels[None, :], mask=(own >= 0)[:, None] & (channels < dim)[None, :], other=0.0)

    row_max = tl.full([GROUP * TOKENS], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP * TOKENS], tl.float32)
    attended = tl.zeros([GROUP * TOKENS, V_DIM], tl.float32)
    for start in range(0, tl.max(own, 0) + 1, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        valid, slots = tokens < length, base + tokens
        inside = valid[:, None] & (channels < dim)[None, :]
        k = tl.load(keys + slots[:, None] * dim + channels[None, :], mask=inside, other=0.0)
        logits = softcapped(dot(query, tl.trans(k), WIDEN) * scale, softcap, CAPPED)
        logits = tl.where(tokens[None, :] <= own[:, None], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # of padding, which sees nothing
        probs, rescale = tl.exp(logits - shift[:, None]), tl.exp(row_max - shift)
        inside = valid[:, None] & (v_channels < v_dim)[None, :]
        v = tl.load(values + slots[:, None] * v_dim + v_channels[None, :], mask=inside, other=0.0)
        attended = attended * rescale[:, None] + dot(probs.to(v.dtype), v, WIDEN)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        row_max = new_max
    if HAS_SINK:
        sink = tl.load(sink_logits + head, mask=member < group, other=0.0)
        top = tl.maximum(row_max, sink)
        rescale = tl.exp(row_max - top)
        attended, row_sum = attended * rescale[:, None], row_sum * rescale + tl.exp(sink - top)
    attended = attended / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    into = output + ((row * kv_heads * group + head) * q + token)[:, None] * v_dim + v_channels[None, :]
    tl.store(into, attended.to(output.dtype.element_ty), mask=there[:, None] & (v_channels < v_dim)[None, :])
