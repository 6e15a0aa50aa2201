"""Causal attention of many queries with torch's kernels, in the shapes in which they are fast.

cuDNN is twice as fast as FlashAttention 2 on Hopper, but plans every new shape (60 ms), knows no causal mask for fewer
queries than keys, and slows down over long texts. So lengths are rounded up, long texts take a block of queries at a
time, and attention to the keys before it is computed apart, in blocks of one size, and merged.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend

from kvkeep.kernels.torch.reference import sdpa_backend
from kvkeep.kernels.triton.common import cdiv, floats, kernel, pow2
from kvkeep.kernels.triton.tiles import load_rows, store_rows

STEP = 256  # lengths are rounded up to a multiple
BLOCK = 32768  # queries at a time: each block is two more shapes
SPAN = 16384  # earlier keys at a time, for fewer queries
HELD = 1024  # of keys that all queries see, a multiple: texts of about one length share their plans
LARGE = 2**25  # queries × keys that are worth cuDNN's plans
TOKENS = 8  # of a program that merges

Attended = tuple[Tensor, Tensor]  # output [rows, heads, q, dim] and log-sum-exp [rows, heads, q]


def chunk_attention(queries, keys, values, scale):
    """Do what the reference does, where torch has a kernel (`sdpa_backend`)"""
    return attention_and_lse(queries, keys, values, scale)[0]


def attention_and_lse(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
    """The same, and each query's log-sum-exp"""
    rows, heads, q, _ = queries.shape
    before = keys.shape[2] - q
    if sdpa_backend(queries, keys, values, scale) is not SDPBackend.CUDNN_ATTENTION:
        return _flash(queries, keys, values, True, scale)
    if q <= BLOCK:
        return _block(queries, keys, values, scale)
    output = queries.new_empty(rows, q, heads, values.shape[-1]).transpose(1, 2)
    lse = floats(queries, rows, heads, q)
    for start in range(0, q, BLOCK):
        end = min(start + BLOCK, q)
        block, seen = slice(start, end), slice(before + end)
        into = output[:, :, block]
        lse[:, :, block] = _block(queries[:, :, block], keys[:, :, seen], values[:, :, seen], scale, into)[1]
    return output, lse


def _block(queries: Tensor, keys: Tensor, values: Tensor, scale: float, output: Tensor | None = None) -> Attended:
    """The last q of n tokens, over all of them."""
    q, before = queries.shape[2], keys.shape[2] - queries.shape[2]
    span = BLOCK if q > SPAN else SPAN  # one size, so that there is one plan
    far = before // span * span if q * before >= LARGE else 0
    padded = _padded(queries)
    near_keys, near_values = keys[:, :, far:], values[:, :, far:]
    if far < before or before and q <= SPAN:  # no plan for what is little work
        attended, lse = _flash(queries, near_keys, near_values, True, scale)
    else:
        attended, lse = _cudnn(padded, _padded(near_keys), _padded(near_values), True, scale)
        attended, lse = attended[:, :, :q], lse[:, :, :q]
    for start in range(0, far, span):
        earlier = keys[:, :, start : start + span], values[:, :, start : start + span]
        other, other_lse = _cudnn(padded, *earlier, False, scale)
        attended = merge(attended, lse, other, other_lse, attended if output is None else output)
        lse = torch.logaddexp(lse, other_lse[:, :, :q])
    return (attended if output is None or far else output.copy_(attended)), lse


def appended_attention(queries, held_keys, held_values, keys, values, scale):
    """Do what the reference does, where torch has a kernel; few of the held keys are copied.

    All queries see all of the others, so the heads of a group are more queries over one head's keys: fewer blocks of
    queries are cut short, and keys are read once for a group.
    """
    rows, heads, q, dim = queries.shape
    far = held_keys.shape[2] // HELD * HELD
    near_keys = torch.cat([held_keys[:, :, far:], keys], 2)
    near_values = torch.cat([held_values[:, :, far:], values], 2)
    attended, lse = _flash(queries, near_keys, near_values, True, scale)  # no plan for what is little work
    if not far:
        return attended
    by_key_head = queries.reshape(rows, held_keys.shape[1], -1, dim)
    count, earlier = by_key_head.shape[2], (held_keys[:, :, :far], held_values[:, :, :far])
    if sdpa_backend(by_key_head, *earlier, scale) is SDPBackend.CUDNN_ATTENTION:
        other, other_lse = _cudnn(_padded(by_key_head), *earlier, False, scale)
    else:
        other, other_lse = _flash(by_key_head, *earlier, False, scale)
    other, other_lse = (t[:, :, :count].reshape(rows, heads, q, *t.shape[3:]) for t in (other, other_lse))
    return merge(attended, lse, other, other_lse, attended)


def _cudnn(queries: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> Attended:
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    output, lse, *_ = attend(queries, keys, values, None, True, 0.0, causal, scale=scale)
    return output, lse.view(queries.shape[:3])


def _flash(queries: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> Attended:
    """Its causal mask ends with the last query and the last key."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    output, lse, *_ = attend(queries, keys, values, 0.0, causal, scale=scale)
    return output, lse


def _padded(tokens: Tensor) -> Tensor:
    """Zeros up to the next multiple of STEP: no earlier query sees them. [rows, heads, n, dim]"""
    rows, heads, n, dim = tokens.shape
    if n % STEP == 0:
        return tokens
    padded = tokens.new_empty(rows, cdiv(n, STEP) * STEP, heads, dim)
    padded[:, :n] = tokens.transpose(1, 2)
    padded[:, n:] = 0
    return padded.transpose(1, 2)


def merge(one: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, output: Tensor) -> Tensor:
    """Attention over two sets of keys from attention over each; the output may be one of the inputs.

    one, other, output [rows, heads, n, dim], lse [rows, heads, at least n]; other is cut to n
    """
    rows, heads, n, dim = one.shape
    strides = [stride for t in (one, other, output) for stride in t.stride()[:3]]
    _merge[cdiv(n, TOKENS), rows * heads](
        one, other, output, lse, other_lse, *strides, *lse.stride()[:2], *other_lse.stride()[:2], n, heads, dim, TOKENS,
        pow2(dim), num_warps=4,
    )  # fmt: skip
    return output


@kernel(do_not_specialize=["n", "lse_row", "lse_head", "other_row", "other_head"])
def _merge(
    one, other, output, lse, other_lse, row_1, head_1, token_1, row_2, head_2, token_2, row_3, head_3, token_3, lse_row,
    lse_head, other_row, other_head, n, heads, dim, TOKENS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    valid, tokens = tokens < n, tokens.to(tl.int64)
    first = tl.load(lse + row * lse_row + head * lse_head + tokens, mask=valid, other=0.0)
    second = tl.load(other_lse + row * other_row + head * other_head + tokens, mask=valid, other=0.0)
    share = (1 / (1 + tl.exp(tl.minimum(first - second, 80.0))))[:, None]  # of the second
    a = load_rows(one + row * row_1 + head * head_1 + tokens * token_1, valid, dim, DIM).to(tl.float32)
    b = load_rows(other + row * row_2 + head * head_2 + tokens * token_2, valid, dim, DIM).to(tl.float32)
    store_rows(output + row * row_3 + head * head_3 + tokens * token_3, a + (b - a) * share, valid, dim, DIM)
