"""What chunks that are away are worth to a query: each chunk's description is read once and reduced on the spot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

UNITS, CHANNELS = 16, 128  # at a time


def score_chunks(query: Tensor, representatives: Tensor) -> Tensor:
    """The product of a probe with the vector that speaks for each chunk: InfLLM's representatives, or mean keys.

    query [heads, dim], representatives [heads, units, dim] -> [heads, units] float32; heads is 1 where all choose
    together
    """
    heads, units, dim = representatives.shape
    query, representatives = query.contiguous(), representatives.contiguous()
    worth = torch.empty(heads, units, dtype=torch.float32, device=query.device)
    _products[triton.cdiv(units, UNITS), heads](query, representatives, worth, units, dim, UNITS, CHANNELS, num_warps=4)
    return worth


def score_bounds(query: Tensor, bounds: Tensor) -> Tensor:
    """The most a key of each page can give a query, averaged over the group: Quest.

    query [heads, dim], bounds [kv_heads, units, 2, dim] (least and most) -> [kv_heads, units] float32
    """
    kv_heads, units, _, dim = bounds.shape
    query, bounds = query.contiguous(), bounds.contiguous()
    worth = torch.empty(kv_heads, units, dtype=torch.float32, device=query.device)
    _bounds[triton.cdiv(units, UNITS), kv_heads](
        query, bounds, worth, units, dim, len(query) // kv_heads, UNITS, CHANNELS, num_warps=4
    )
    return worth


@triton.jit
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


@triton.jit
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
