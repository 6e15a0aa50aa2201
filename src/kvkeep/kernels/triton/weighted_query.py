"""A window's queries averaged by their activation bias, and the moments of all queries so far (ActQKV).

Two passes: the first goes channel by channel (moments, and each channel's term of a query's bias), the second averages
queries by their bias. Heads are averaged within their group and concatenated: channels of one vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, fast_launch, pow2

MOST, ROWS, CHANNELS = 256, 64, 32  # rows per block of the first pass and of the second; channels per block


def weighted_query(
    queries: Tensor, kv_heads: int, count: int, mean: Tensor | None, variance: Tensor | None, question: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As in the reference, for queries with last stride 1"""
    heads, w, dim = queries.shape
    width, blocks, num_question = kv_heads * dim, cdiv(dim, CHANNELS), 0 if question is None else len(question)
    window = torch.empty(w + num_question, width, dtype=torch.float32, device=queries.device)
    parts = torch.empty(kv_heads * blocks, w + num_question, dtype=torch.float32, device=queries.device)
    results = torch.empty(3, width, dtype=torch.float32, device=queries.device)
    old_mean, old_variance = results if mean is None else mean, results if variance is None else variance
    _moments[kv_heads, blocks](
        queries, window if question is None else question.contiguous(), old_mean, old_variance, window, parts, results,
        w, num_question, heads // kv_heads, dim, *queries.stride()[:2], count / (count + w), w / (count + w),
        mean is None, max(16, min(MOST, pow2(w))), CHANNELS, num_warps=8,
    )  # fmt: skip
    _weighted_mean[cdiv(width, CHANNELS),](
        window, parts, results, w + num_question, width, kv_heads * blocks, pow2(kv_heads * blocks), ROWS, CHANNELS,
        num_warps=4,
    )  # fmt: skip
    new_mean, new_variance, query = results.unbind()
    return new_mean, new_variance, query


@fast_launch
@triton.jit(do_not_specialize=["w", "num_question", "weight_old", "weight_new"])
def _moments(
    queries, question, mean, variance, window, parts, results, w, num_question, group, dim, head_stride, stride,
    weight_old, weight_new, FIRST: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """weight_old, weight_new: fractions of earlier queries and of the window's among all"""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.num_programs(0) * dim
    in_head = block * CHANNELS + tl.arange(0, CHANNELS)
    valid, channels = in_head < dim, head * dim + in_head
    heads = queries + head * group * head_stride + in_head[None, :]
    total = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, w, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < w)[:, None] & valid[None, :]
        mean_query = _mean_heads(heads + rows[:, None] * stride, inside, group, head_stride, ROWS, CHANNELS)
        total += tl.sum(mean_query, 0)
        tl.store(window + rows[:, None] * width + channels[None, :], mean_query, mask=inside)
    mean_now = total / w
    total = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, w, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < w)[:, None] & valid[None, :]
        mean_query = _mean_heads(heads + rows[:, None] * stride, inside, group, head_stride, ROWS, CHANNELS)
        deviation = tl.where(inside, mean_query - mean_now[None, :], 0.0)
        total += tl.sum(deviation * deviation, 0)
    var_now = total / w
    if not FIRST:
        mean_before = tl.load(mean + channels, mask=valid, other=0.0)
        shift = mean_now - mean_before
        mean_now = mean_before + shift * weight_new
        var_now = tl.load(variance + channels, mask=valid, other=0.0) * weight_old + var_now * weight_new
        var_now += shift * shift * (weight_old * weight_new)
    tl.store(results + channels, mean_now, mask=valid)
    tl.store(results + width + channels, var_now, mask=valid)
    constant = var_now <= 1e-12 * tl.maximum(mean_now * mean_now, 1e-30)  # a constant channel is ignored
    var_now = tl.where(constant | (in_head >= dim), float("inf"), var_now)
    bias = parts + (head * tl.num_programs(1) + block) * (w + num_question)
    for start in range(0, w, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < w)[:, None] & valid[None, :]
        mean_query = _mean_heads(heads + rows[:, None] * stride, inside, group, head_stride, ROWS, CHANNELS)
        deviation = mean_query - mean_now[None, :]
        tl.store(bias + rows, tl.sum(deviation * deviation / var_now[None, :], 1), mask=rows < w)
    for start in range(0, num_question, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < num_question)[:, None] & valid[None, :]
        asked = tl.load(question + rows[:, None] * width + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        deviation = asked - mean_now[None, :]
        tl.store(bias + w + rows, tl.sum(deviation * deviation / var_now[None, :], 1), mask=rows < num_question)
        tl.store(window + (w + rows[:, None]) * width + channels[None, :], asked, mask=inside)


@triton.jit
def _mean_heads(heads, inside, group, head_stride, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The mean of a group's heads, in float32."""
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for member in range(0, group):
        total += tl.load(heads + member * head_stride, mask=inside, other=0.0).to(tl.float32)
    return total / group


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _weighted_mean(
    window, parts, results, rows, width, blocks, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    block_ids = tl.arange(0, BLOCKS)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    unweighted, weighted = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, rows, ROWS):
        row_ids = start + tl.arange(0, ROWS)
        inside = (block_ids < blocks)[:, None] & (row_ids < rows)[None, :]
        bias = tl.sum(tl.load(parts + block_ids[:, None] * rows + row_ids[None, :], mask=inside, other=0.0), 0)
        valid = (row_ids < rows)[:, None] & (channels < width)[None, :]
        vectors = tl.load(window + row_ids[:, None] * width + channels[None, :], mask=valid, other=0.0)
        total += bias
        unweighted += tl.sum(vectors, 0)
        weighted += tl.sum(vectors * bias[:, None], 0)
    bias_sum = tl.sum(total, 0)
    query = tl.where(bias_sum > 0, weighted / tl.maximum(bias_sum, 1e-30), unweighted / rows)
    tl.store(results + 2 * width + channels, query, mask=channels < width)
