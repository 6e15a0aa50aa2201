"""What a decode step makes of each row's query before units are scored, and of the scores: mean, moments, quotas.

`weighted_query`, a window's queries averaged by their activation bias (ActQKV), in two passes: the first goes channel
by channel (moments, and each channel's term of a query's bias), the second averages queries by their bias. Heads are
averaged within their group and concatenated: channels of one vector.
"""

import torch
import triton
import triton.language as tl

from kvkeep.kernels.triton.common import cdiv, floats, kernel, pow2
from kvkeep.kernels.triton.tiles import load_rows, store_rows

COMPARED = 1024  # units per block


def mean_queries(queries, kv_heads, moments, weight):
    """Do what the reference does. The last stride of the queries is 1"""
    rows, heads, dim = queries.shape
    vectors = floats(queries, rows, kv_heads * dim)
    _mean_queries[rows, kv_heads](
        queries, vectors, moments, weight, *queries.stride()[:2], heads // kv_heads, dim, pow2(dim), num_warps=1
    )
    return vectors


def share_quota(scores, units, left, densities, layer, most):
    """Do what the reference does."""
    share = torch.empty_like(left)
    _share_quota[len(units),](
        scores, units, left, densities, share, scores.shape[1], layer, densities.shape[1], most, COMPARED, num_warps=4
    )
    return share


@kernel()
def _mean_queries(
    queries, vectors, moments, weight, row_stride, head_stride, group, dim, DIM: tl.constexpr
):  # fmt: skip
    row, head, channels = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DIM)
    total = tl.zeros([DIM], tl.float32)
    for member in range(0, group):
        pointer = queries + row * row_stride + (head * group + member) * head_stride + channels
        total += tl.load(pointer, mask=channels < dim, other=0.0).to(tl.float32)
    total = total / group
    width, place = tl.num_programs(1) * dim, head * dim + channels
    tl.store(vectors + row * width + place, total, mask=channels < dim)
    if moments is not None:
        new = tl.load(weight + row)
        pointer = moments + row * 2 * width + place
        mean = tl.load(pointer, mask=channels < dim, other=0.0)
        variance = tl.load(pointer + width, mask=channels < dim, other=0.0)
        shift = total - mean
        tl.store(pointer, mean + shift * new, mask=channels < dim)
        variance = variance * (1 - new) + shift * shift * (new * (1 - new))
        tl.store(pointer + width, variance, mask=channels < dim)


@kernel(do_not_specialize=["most_units", "layer"])
def _share_quota(scores, units, left, densities, share, most_units, layer, layers, most, COMPARED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end, quota = tl.load(units + row).to(tl.int32), tl.load(left + row)
    taken = quota * 0
    if end > 0:
        largest, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
        weighted = tl.full([], 0.0, tl.float32)  # the sum of exponentials times their logits
        for start in range(0, end, COMPARED):
            places = start + tl.arange(0, COMPARED)
            score = tl.load(scores + row * most_units + places, mask=places < end, other=float("-inf"))
            new_largest = tl.maximum(largest, tl.max(score, 0))
            rescale = tl.where(total > 0, tl.exp(largest - new_largest), 0.0)
            lower = tl.where(total > 0, largest - new_largest, 0.0)
            logit = tl.where(places < end, score - new_largest, 0.0)
            exponential = tl.where(places < end, tl.exp(logit), 0.0)
            weighted = (weighted + lower * total) * rescale + tl.sum(exponential * logit, 0)
            total, largest = total * rescale + tl.sum(exponential, 0), new_largest
        now = (tl.log(total) - weighted / total).to(tl.float64)
        now = tl.maximum(now, 0.0)
        known = densities + row * layers * 2
        entropies = now
        for later in range(layer + 1, layers):
            density = tl.load(known + later * 2)
            entropies += tl.where(density != density, now, density)
        part = tl.where(entropies > 0, now / tl.where(entropies > 0, entropies, 1.0), 1.0 / (layers - layer))
        taken = tl.minimum(quota, (part * quota.to(tl.float64) + 1e-9).to(tl.int64))
        taken = tl.minimum(taken, most)
        before, steps = tl.load(known + layer * 2), tl.load(known + layer * 2 + 1)
        steps = tl.where(before != before, 0.0, steps)
        tl.store(known + layer * 2, (tl.where(steps > 0, before, 0.0) * steps + now) / (steps + 1))
        tl.store(known + layer * 2 + 1, steps + 1)
    tl.store(share + row, taken)
    tl.store(left + row, quota - taken)


MOST, ROWS, CHANNELS = 256, 64, 32  # rows per block of the first pass and of the second; channels per block


def weighted_query(queries, kv_heads, count, mean, variance, question):
    """Do what the reference does, for queries with last stride 1"""
    heads, w, dim = queries.shape
    width, blocks, num_question = kv_heads * dim, cdiv(dim, CHANNELS), 0 if question is None else len(question)
    window = floats(queries, w + num_question, width)
    parts = floats(queries, kv_heads * blocks, w + num_question)
    results = floats(queries, 3, width)
    _moments[kv_heads, blocks](
        queries, window if question is None else question.contiguous(), mean, variance, window, parts, results, w,
        num_question, heads // kv_heads, dim, *queries.stride()[:2], count / (count + w), w / (count + w),
        max(16, min(MOST, pow2(w))), CHANNELS, num_warps=8,
    )  # fmt: skip
    _weighted_mean[cdiv(width, CHANNELS),](
        window, parts, results, w + num_question, width, kv_heads * blocks, pow2(kv_heads * blocks), ROWS, CHANNELS,
        num_warps=4,
    )  # fmt: skip
    new_mean, new_variance, query = results.unbind()
    return new_mean, new_variance, query


@kernel(do_not_specialize=["w", "num_question", "weight_old", "weight_new"])
def _moments(
    queries, question, mean, variance, window, parts, results, w, num_question, group, dim, head_stride, stride,
    weight_old, weight_new, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """weight_old, weight_new: fractions of earlier queries and of the window's among all"""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.num_programs(0) * dim
    in_head = block * CHANNELS + tl.arange(0, CHANNELS)
    valid, channels = in_head < dim, head * dim + in_head
    first, here = head * dim + block * CHANNELS, dim - block * CHANNELS  # the first channel, and how many there are
    heads = queries + head * group * head_stride + block * CHANNELS
    total = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, w, ROWS):
        rows = start + tl.arange(0, ROWS)
        mean_query = _mean_heads(heads + rows * stride, rows < w, here, group, head_stride, ROWS, CHANNELS)
        total += tl.sum(mean_query, 0)
        store_rows(window + rows * width + first, mean_query, rows < w, here, CHANNELS)
    mean_now = total / w
    total = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, w, ROWS):
        rows = start + tl.arange(0, ROWS)
        mean_query = _mean_heads(heads + rows * stride, rows < w, here, group, head_stride, ROWS, CHANNELS)
        deviation = tl.where((rows < w)[:, None] & valid[None, :], mean_query - mean_now[None, :], 0.0)
        total += tl.sum(deviation * deviation, 0)
    var_now = total / w
    if mean is not None:
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
        mean_query = _mean_heads(heads + rows * stride, rows < w, here, group, head_stride, ROWS, CHANNELS)
        deviation = mean_query - mean_now[None, :]
        tl.store(bias + rows, tl.sum(deviation * deviation / var_now[None, :], 1), mask=rows < w)
    for start in range(0, num_question, ROWS):
        rows = start + tl.arange(0, ROWS)
        asked = load_rows(question + rows * width + first, rows < num_question, here, CHANNELS).to(tl.float32)
        deviation = asked - mean_now[None, :]
        tl.store(bias + w + rows, tl.sum(deviation * deviation / var_now[None, :], 1), mask=rows < num_question)
        store_rows(window + (w + rows) * width + first, asked, rows < num_question, here, CHANNELS)


@triton.jit
def _mean_heads(heads, valid, dim, group, head_stride, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The mean of a group's heads, in float32."""
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for member in range(0, group):
        total += load_rows(heads + member * head_stride, valid, dim, CHANNELS).to(tl.float32)
    return total / group


@kernel(do_not_specialize=["rows"])
def _weighted_mean(
    window, parts, results, rows, width, blocks, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    block_ids, first = tl.arange(0, BLOCKS), tl.program_id(0) * CHANNELS
    channels = first + tl.arange(0, CHANNELS)
    unweighted, weighted = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, rows, ROWS):
        row_ids = start + tl.arange(0, ROWS)
        inside = (block_ids < blocks)[:, None] & (row_ids < rows)[None, :]
        bias = tl.sum(tl.load(parts + block_ids[:, None] * rows + row_ids[None, :], mask=inside, other=0.0), 0)
        vectors = load_rows(window + row_ids * width + first, row_ids < rows, width - first, CHANNELS)
        total += bias
        unweighted += tl.sum(vectors, 0)
        weighted += tl.sum(vectors * bias[:, None], 0)
    bias_sum = tl.sum(total, 0)
    query = tl.where(bias_sum > 0, weighted / tl.maximum(bias_sum, 1e-30), unweighted / rows)
    tl.store(results + 2 * width + channels, query, mask=channels < width)
