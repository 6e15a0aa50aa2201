"""What chunks that are away are worth to a query, and which of them are fetched.

Each chunk's description is read once and reduced on the spot. Which are best is found by one program: the worth of the
last one that is fetched digit by digit, then all that are worth more, and of its equals the later ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, quick

UNITS, CHANNELS = 16, 128  # at a time
COMPARED = 1024  # units at a time, while the best are sought


def score_chunks(query: Tensor, representatives: Tensor) -> Tensor:
    """The product of a probe with the vector that speaks for each chunk: InfLLM's representatives, or mean keys.

    query [heads, dim], representatives [heads, units, dim] -> [heads, units] float32; heads is 1 where all choose
    together
    """
    heads, units, dim = representatives.shape
    query, representatives = query.contiguous(), representatives.contiguous()
    worth = torch.empty(heads, units, dtype=torch.float32, device=query.device)
    _products[cdiv(units, UNITS), heads](query, representatives, worth, units, dim, UNITS, CHANNELS, num_warps=4)
    return worth


def match(probe: Tensor, about: Tensor, cosine: bool) -> Tensor:
    """As the reference's. probe [dim], about [1, units, dim]"""
    _, units, dim = about.shape
    about = about.contiguous()
    worth = torch.empty(1, units, dtype=torch.float32, device=probe.device)
    if cosine:
        _cosines[cdiv(units, UNITS),](probe, about, worth, units, dim, UNITS, CHANNELS, num_warps=4)
    else:
        _products[cdiv(units, UNITS), 1](probe, about, worth, units, dim, UNITS, CHANNELS, num_warps=4)
    return worth


def spend_even(worth: Tensor, size: int, quota: int) -> Tensor:
    """As the reference's. worth [heads, units] float32"""
    heads, units = worth.shape
    count = min(units, quota // size)
    index = torch.empty(heads, count * size, dtype=torch.int64, device=worth.device)
    if count:
        _spent[heads,](worth.contiguous(), index, units, count, size, COMPARED, num_warps=16)
    return index


def score_bounds(query: Tensor, bounds: Tensor) -> Tensor:
    """The most a key of each page can give a query, averaged over the group: Quest.

    query [heads, dim], bounds [kv_heads, units, 2, dim] (least and most) -> [kv_heads, units] float32
    """
    kv_heads, units, _, dim = bounds.shape
    query, bounds = query.contiguous(), bounds.contiguous()
    worth = torch.empty(kv_heads, units, dtype=torch.float32, device=query.device)
    _bounds[cdiv(units, UNITS), kv_heads](
        query, bounds, worth, units, dim, len(query) // kv_heads, UNITS, CHANNELS, num_warps=4
    )
    return worth


@quick
@triton.jit(do_not_specialize=["units"])
def _products(query, representatives, worth, units, dim, UNITS: tl.constexpr, CHANNELS: tl.constexpr):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    mine = block * UNITS + tl.arange(0, UNITS)
    rows = representatives + (head * units + mine)[:, None] * dim
    total = tl.zeros([UNITS, CHANNELS], tl.float32)
    for start in range(0, dim, CHANNELS):
        channels = start + tl.arange(0, CHANNELS)
        q = tl.load(query + head * dim + channels, mask=channels < dim, other=0.0).to(tl.float32)
        inside = (mine < units)[:, None] & (channels < dim)[None, :]
        total += tl.load(rows + channels[None, :], mask=inside, other=0.0).to(tl.float32) * q[None, :]
    tl.store(worth + head * units + mine, tl.sum(total, 1), mask=mine < units)


@quick
@triton.jit(do_not_specialize=["units"])
def _cosines(probe, about, worth, units, dim, UNITS: tl.constexpr, CHANNELS: tl.constexpr):
    """`_products` with a probe of length 1."""
    mine = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    total, squares = tl.zeros([UNITS, CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    for start in range(0, dim, CHANNELS):
        channels = start + tl.arange(0, CHANNELS)
        q = tl.load(probe + channels, mask=channels < dim, other=0.0)
        inside = (mine < units)[:, None] & (channels < dim)[None, :]
        known = tl.load(about + mine[:, None] * dim + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        total += known * q[None, :]
        squares += q * q
    tl.store(worth + mine, tl.sum(total, 1) / tl.maximum(tl.sqrt(tl.sum(squares, 0)), 1e-12), mask=mine < units)


@quick
@triton.jit(do_not_specialize=["units", "count"])
def _spent(worth, index, units, count, size, COMPARED: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    worth, index = worth + head * units, index + head * count * size
    digits = tl.arange(0, 16)
    least = tl.full([], -2147483648, tl.int64)  # the most that as many as are fetched reach
    for i in range(0, 8):
        step = tl.full([], 1, tl.int64) << (28 - 4 * i)
        reached = tl.zeros([COMPARED, 16], tl.int32)  # added up at the end: threads need not meet before
        for start in range(0, units, COMPARED):
            mine = start + tl.arange(0, COMPARED)
            rank = _rank(worth + mine, mine < units)
            enough = (rank[:, None] >= (least + digits * step).to(tl.int32)[None, :]) & (mine < units)[:, None]
            reached += enough.to(tl.int32)
        least += (tl.sum((tl.sum(reached, 0) >= count).to(tl.int64), 0) - 1) * step
    last = least.to(tl.int32)
    above, equal = tl.zeros([COMPARED], tl.int32), tl.zeros([COMPARED], tl.int32)
    for start in range(0, units, COMPARED):
        mine = start + tl.arange(0, COMPARED)
        rank = _rank(worth + mine, mine < units)
        above += ((rank > last) & (mine < units)).to(tl.int32)
        equal += ((rank == last) & (mine < units)).to(tl.int32)
    passed_by = tl.sum(equal, 0) - (count - tl.sum(above, 0))  # of the equals, the first so many
    taken, met = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, units, COMPARED):
        mine = start + tl.arange(0, COMPARED)
        rank = _rank(worth + mine, mine < units)
        same = ((rank == last) & (mine < units)).to(tl.int32)
        late = met + tl.cumsum(same, 0) > passed_by
        chosen = (mine < units) & ((rank > last) | ((same > 0) & late))
        place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        for j in range(0, size):
            tl.store(index + place.to(tl.int64) * size + j, mine.to(tl.int64) * size + j, mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), 0)
        met += tl.sum(same, 0)


@triton.jit
def _rank(worth, real):
    """Whole numbers in the order of the floating ones."""
    value = tl.load(worth, mask=real, other=0.0)
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # no zero is less than another
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@quick
@triton.jit(do_not_specialize=["units"])
def _bounds(query, bounds, worth, units, dim, group, UNITS: tl.constexpr, CHANNELS: tl.constexpr):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    mine = block * UNITS + tl.arange(0, UNITS)
    rows = bounds + (head * units + mine)[:, None] * 2 * dim
    total = tl.zeros([UNITS, CHANNELS], tl.float32)
    for start in range(0, dim, CHANNELS):
        channels = start + tl.arange(0, CHANNELS)
        up, down = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
        for member in range(0, group):
            where = query + (head * group + member) * dim + channels
            q = tl.load(where, mask=channels < dim, other=0.0).to(tl.float32)
            up, down = up + tl.maximum(q, 0.0), down + tl.minimum(q, 0.0)
        inside = (mine < units)[:, None] & (channels < dim)[None, :]
        low = tl.load(rows + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        high = tl.load(rows + dim + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        total += high * up[None, :] + low * down[None, :]
    tl.store(worth + head * units + mine, tl.sum(total, 1) / group, mask=mine < units)
