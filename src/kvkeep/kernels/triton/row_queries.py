"""What a decode step makes of each row's query before units are scored, and of the scores: mean, moments, quotas."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import fast_launch, pow2

COMPARED = 1024  # units per block


def mean_queries(queries: Tensor, kv_heads: int, moments: Tensor | None, weight: Tensor) -> Tensor:
    """As in the reference. The last stride of the queries is 1"""
    rows, heads, dim = queries.shape
    vectors = torch.empty(rows, kv_heads * dim, dtype=torch.float32, device=queries.device)
    _mean_queries[rows, kv_heads](
        queries, vectors, vectors if moments is None else moments, weight, *queries.stride()[:2], heads // kv_heads,
        dim, moments is not None, pow2(dim), num_warps=1,
    )  # fmt: skip
    return vectors


def share_quota(scores: Tensor, units: Tensor, left: Tensor, densities: Tensor, layer: int, most: int) -> Tensor:
    """As in the reference."""
    share = torch.empty_like(left)
    _share_quota[len(units),](
        scores, units, left, densities, share, scores.shape[1], layer, densities.shape[1], most, COMPARED, num_warps=4
    )
    return share


@fast_launch
@triton.jit
def _mean_queries(
    queries, vectors, moments, weight, row_stride, head_stride, group, dim, MOMENTS: tl.constexpr, DIM: tl.constexpr
):
    row, head, channels = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DIM)
    total = tl.zeros([DIM], tl.float32)
    for member in range(0, group):
        pointer = queries + row * row_stride + (head * group + member) * head_stride + channels
        total += tl.load(pointer, mask=channels < dim, other=0.0).to(tl.float32)
    total = total / group
    width, place = tl.num_programs(1) * dim, head * dim + channels
    tl.store(vectors + row * width + place, total, mask=channels < dim)
    if MOMENTS:
        new = tl.load(weight + row)
        pointer = moments + row * 2 * width + place
        mean = tl.load(pointer, mask=channels < dim, other=0.0)
        variance = tl.load(pointer + width, mask=channels < dim, other=0.0)
        shift = total - mean
        tl.store(pointer, mean + shift * new, mask=channels < dim)
        variance = variance * (1 - new) + shift * shift * (new * (1 - new))
        tl.store(pointer + width, variance, mask=channels < dim)


@fast_launch
@triton.jit(do_not_specialize=["most_units", "layer"])
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
