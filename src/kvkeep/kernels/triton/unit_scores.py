"""Scores of offloaded units for a query, and the selection of the best.

Each unit's description is read once. One program per head selects: it finds the lowest selected score digit by digit,
then takes all units above it, and of its equals the later ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, fast_launch

UNITS, CHANNELS = 16, 128  # per block
COMPARED = 1024  # units per block of the selection


def score_centroids(query: Tensor, centroids: Tensor) -> Tensor:
    """As in the reference. query [heads, dim], centroids [heads, units, dim]"""
    heads, units, dim = centroids.shape
    query, centroids = query.contiguous(), centroids.contiguous()
    scores = torch.empty(heads, units, dtype=torch.float32, device=query.device)
    _products[cdiv(units, UNITS), heads](query, centroids, scores, units, dim, UNITS, CHANNELS, num_warps=4)
    return scores


def score_representatives(query: Tensor, descriptions: Tensor, cosine: bool) -> Tensor:
    """As in the reference. query [dim], descriptions [1, units, dim]"""
    _, units, dim = descriptions.shape
    descriptions = descriptions.contiguous()
    scores = torch.empty(1, units, dtype=torch.float32, device=query.device)
    if cosine:
        _cosines[cdiv(units, UNITS),](query, descriptions, scores, units, dim, UNITS, CHANNELS, num_warps=4)
    else:
        _products[cdiv(units, UNITS), 1](query, descriptions, scores, units, dim, UNITS, CHANNELS, num_warps=4)
    return scores


def select_uniform_units(scores: Tensor, size: int, quota: int) -> Tensor:
    """As in the reference. scores [heads, units] float32"""
    heads, units = scores.shape
    count = min(units, quota // size)
    index = torch.empty(heads, count * size, dtype=torch.int64, device=scores.device)
    if count:
        _select_uniform_units[heads,](scores.contiguous(), index, units, count, size, COMPARED, num_warps=16)
    return index


def score_page_bounds(query: Tensor, bounds: Tensor) -> Tensor:
    """As in the reference. query [heads, dim], bounds [kv_heads, units, 2, dim]"""
    kv_heads, units, _, dim = bounds.shape
    query, bounds = query.contiguous(), bounds.contiguous()
    scores = torch.empty(kv_heads, units, dtype=torch.float32, device=query.device)
    _score_page_bounds[cdiv(units, UNITS), kv_heads](
        query, bounds, scores, units, dim, len(query) // kv_heads, UNITS, CHANNELS, num_warps=4
    )
    return scores


@fast_launch
@triton.jit(do_not_specialize=["units"])
def _products(query, vectors, scores, units, dim, UNITS: tl.constexpr, CHANNELS: tl.constexpr):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    unit_ids = block * UNITS + tl.arange(0, UNITS)
    rows = vectors + (head * units + unit_ids)[:, None] * dim
    total = tl.zeros([UNITS, CHANNELS], tl.float32)
    for start in range(0, dim, CHANNELS):
        channels = start + tl.arange(0, CHANNELS)
        q = tl.load(query + head * dim + channels, mask=channels < dim, other=0.0).to(tl.float32)
        inside = (unit_ids < units)[:, None] & (channels < dim)[None, :]
        total += tl.load(rows + channels[None, :], mask=inside, other=0.0).to(tl.float32) * q[None, :]
    tl.store(scores + head * units + unit_ids, tl.sum(total, 1), mask=unit_ids < units)


@fast_launch
@triton.jit(do_not_specialize=["units"])
def _cosines(query, vectors, scores, units, dim, UNITS: tl.constexpr, CHANNELS: tl.constexpr):
    """`_products` with a query of length 1."""
    unit_ids = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    total, squares = tl.zeros([UNITS, CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    for start in range(0, dim, CHANNELS):
        channels = start + tl.arange(0, CHANNELS)
        q = tl.load(query + channels, mask=channels < dim, other=0.0)
        inside = (unit_ids < units)[:, None] & (channels < dim)[None, :]
        rows = tl.load(vectors + unit_ids[:, None] * dim + channels[None, :], mask=inside, other=0.0)
        total += rows.to(tl.float32) * q[None, :]
        squares += q * q
    norm = tl.maximum(tl.sqrt(tl.sum(squares, 0)), 1e-12)
    tl.store(scores + unit_ids, tl.sum(total, 1) / norm, mask=unit_ids < units)


@fast_launch
@triton.jit(do_not_specialize=["units", "count"])
def _select_uniform_units(scores, index, units, count, size, COMPARED: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    scores, index = scores + head * units, index + head * count * size
    digits = tl.arange(0, 16)
    threshold = tl.full([], -2147483648, tl.int64)  # the highest rank that at least `count` units reach
    for i in range(0, 8):
        step = tl.full([], 1, tl.int64) << (28 - 4 * i)
        num_reached = tl.zeros([COMPARED, 16], tl.int32)  # reduced at the end: no synchronization before
        for start in range(0, units, COMPARED):
            unit_ids = start + tl.arange(0, COMPARED)
            rank = _rank(scores + unit_ids, unit_ids < units)
            reaches = (rank[:, None] >= (threshold + digits * step).to(tl.int32)[None, :]) & (unit_ids < units)[:, None]
            num_reached += reaches.to(tl.int32)
        threshold += (tl.sum((tl.sum(num_reached, 0) >= count).to(tl.int64), 0) - 1) * step
    last = threshold.to(tl.int32)
    above, equal = tl.zeros([COMPARED], tl.int32), tl.zeros([COMPARED], tl.int32)
    for start in range(0, units, COMPARED):
        unit_ids = start + tl.arange(0, COMPARED)
        rank = _rank(scores + unit_ids, unit_ids < units)
        above += ((rank > last) & (unit_ids < units)).to(tl.int32)
        equal += ((rank == last) & (unit_ids < units)).to(tl.int32)
    skip = tl.sum(equal, 0) - (count - tl.sum(above, 0))  # of the equals, the first are not selected
    num_selected, num_equal_seen = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, units, COMPARED):
        unit_ids = start + tl.arange(0, COMPARED)
        rank = _rank(scores + unit_ids, unit_ids < units)
        same = ((rank == last) & (unit_ids < units)).to(tl.int32)
        is_late = num_equal_seen + tl.cumsum(same, 0) > skip
        is_selected = (unit_ids < units) & ((rank > last) | ((same > 0) & is_late))
        slot = num_selected + tl.cumsum(is_selected.to(tl.int32), 0) - 1
        for j in range(0, size):
            tl.store(index + slot.to(tl.int64) * size + j, unit_ids.to(tl.int64) * size + j, mask=is_selected)
        num_selected += tl.sum(is_selected.to(tl.int32), 0)
        num_equal_seen += tl.sum(same, 0)


@triton.jit
def _rank(scores, valid):
    """float32 scores as int32 in the same order."""
    value = tl.load(scores, mask=valid, other=0.0)
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@fast_launch
@triton.jit(do_not_specialize=["units"])
def _score_page_bounds(query, bounds, scores, units, dim, group, UNITS: tl.constexpr, CHANNELS: tl.constexpr):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    unit_ids = block * UNITS + tl.arange(0, UNITS)
    rows = bounds + (head * units + unit_ids)[:, None] * 2 * dim
    total = tl.zeros([UNITS, CHANNELS], tl.float32)
    for start in range(0, dim, CHANNELS):
        channels = start + tl.arange(0, CHANNELS)
        positive, negative = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
        for member in range(0, group):
            pointer = query + (head * group + member) * dim + channels
            q = tl.load(pointer, mask=channels < dim, other=0.0).to(tl.float32)
            positive, negative = positive + tl.maximum(q, 0.0), negative + tl.minimum(q, 0.0)
        inside = (unit_ids < units)[:, None] & (channels < dim)[None, :]
        low = tl.load(rows + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        high = tl.load(rows + dim + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        total += high * positive[None, :] + low * negative[None, :]
    tl.store(scores + head * units + unit_ids, tl.sum(total, 1) / group, mask=unit_ids < units)
