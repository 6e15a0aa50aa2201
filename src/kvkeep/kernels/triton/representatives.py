"""Who speaks for a unit of neighbouring tokens, and the mean of these: one program per unit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import power, quick


def speakers(keys: Tensor, mass: Tensor, units: int, count: int, cosine: bool, room: Tensor | None = None) -> Tensor:
    """As the reference's; room: where to put them."""
    kv_heads, n, dim = keys.shape
    keys = keys if keys.stride(1) == dim and keys.stride(2) == 1 else keys.contiguous()
    size = n // units
    about = room
    if about is None:
        about = torch.empty(1, units, kv_heads * dim, dtype=torch.float32, device=keys.device)
    if mass.dim() == 2 and count >= size:
        mass = mass[0]  # all speak, whoever chooses
    if mass.dim() == 2:
        group = len(mass) // kv_heads
        width = power(kv_heads) * power(group)
        _by_head[units,](
            keys, mass, about, keys.stride(0), mass.stride(0), size, min(count, size), kv_heads, group, dim, cosine,
            power(size), power(kv_heads), power(group), power(dim),
            num_warps=8 if width * max(power(size), power(dim)) > 4096 else 4,
        )  # fmt: skip
        return about
    _speakers[units,](
        keys, mass, about, keys.stride(0), size, min(count, size), kv_heads, dim, cosine, power(size),
        power(kv_heads), power(dim), num_warps=4,
    )  # fmt: skip
    return about


@quick
@triton.jit
def _speakers(
    keys, mass, about, head_step, size, count, kv_heads, dim, COSINE: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    tokens, heads, channels = tl.arange(0, SIZE), tl.arange(0, HEADS), tl.arange(0, DIM)
    mine = tl.load(mass + unit * size + tokens, mask=tokens < size, other=float("-inf"))
    other = tl.load(mass + unit * size + tokens, mask=tokens < size, other=float("-inf"))
    later = tokens[None, :] > tokens[:, None]  # of equals, the later one speaks
    ahead = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & later & (tokens < size)[None, :])
    speaks = (tl.sum(ahead.to(tl.int32), 1) < count) & (tokens < size)
    turn = tl.cumsum(speaks.to(tl.int32), 0) - 1
    inside = (heads < kv_heads)[:, None] & (channels < dim)[None, :]
    total = tl.zeros([HEADS, DIM], tl.float32)
    for i in range(0, count):
        token = unit * size + tl.sum(tl.where(speaks & (turn == i), tokens, 0), 0)
        where = keys + heads[:, None].to(tl.int64) * head_step + token * dim + channels[None, :]
        key = tl.load(where, mask=inside, other=0.0).to(tl.float32)
        if COSINE:
            key = key / tl.maximum(tl.sqrt(tl.sum(tl.sum(key * key, 1), 0)), 1e-12)
        total += key
    where = about + unit * kv_heads * dim + heads[:, None] * dim + channels[None, :]
    tl.store(where, total / count, mask=inside)


@quick
@triton.jit
def _by_head(
    keys, mass, about, k_head, m_head, size, count, kv_heads, group, dim, COSINE: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Every query head's best token, then its next best: one vector of all heads after another, added up."""
    unit = tl.program_id(0).to(tl.int64)
    tokens, channels, row = tl.arange(0, SIZE), tl.arange(0, DIM), tl.arange(0, HEADS * GROUP)
    head, member = row // GROUP, row % GROUP
    real = (head < kv_heads) & (member < group)
    where = mass + (head * group + member)[:, None].to(tl.int64) * m_head + unit * size + tokens[None, :]
    left = tl.load(where, mask=real[:, None] & (tokens < size)[None, :], other=float("-inf"))
    inside = real[:, None] & (channels < dim)[None, :]
    total = tl.zeros([HEADS * GROUP, DIM], tl.float32)
    for _ in range(0, count):
        best = tl.max(left, 1)
        token = tl.max(tl.where(left == best[:, None], tokens[None, :], -1), 1)  # of equals, the later one
        left = tl.where(tokens[None, :] == token[:, None], float("-inf"), left)
        start = head.to(tl.int64) * k_head + (unit * size + token) * dim
        key = tl.load(keys + start[:, None] + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        if COSINE:
            key = key / tl.maximum(tl.sqrt(tl.sum(tl.sum(key * key, 1), 0) / group), 1e-12)
        total += key
    mean = tl.sum(tl.reshape(total, [HEADS, GROUP, DIM]), 1) / (count * group)
    heads = tl.arange(0, HEADS)
    where = about + unit * kv_heads * dim + heads[:, None] * dim + channels[None, :]
    tl.store(where, mean, mask=(heads < kv_heads)[:, None] & (channels < dim)[None, :])
