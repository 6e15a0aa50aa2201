"""The representative tokens of a unit of neighbouring tokens, and the mean of their keys: one program per unit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import fast_launch, pow2


def unit_representatives(
    keys: Tensor, mass: Tensor, units: int, count: int, cosine: bool, out: Tensor | None = None
) -> Tensor:
    """As in the reference; out: buffer for the result."""
    kv_heads, n, dim = keys.shape
    keys = keys if keys.stride(1) == dim and keys.stride(2) == 1 else keys.contiguous()
    size = n // units
    if out is None:
        out = torch.empty(1, units, kv_heads * dim, dtype=torch.float32, device=keys.device)
    if mass.dim() == 2 and count >= size:
        mass = mass[0]  # all tokens are chosen
    if mass.dim() == 2:
        group = len(mass) // kv_heads
        width = pow2(kv_heads) * pow2(group)
        _by_head[units,](
            keys, mass, out, keys.stride(0), mass.stride(0), size, min(count, size), kv_heads, group, dim, cosine,
            pow2(size), pow2(kv_heads), pow2(group), pow2(dim),
            num_warps=8 if width * max(pow2(size), pow2(dim)) > 4096 else 4,
        )  # fmt: skip
        return out
    _unit_representatives[units,](
        keys, mass, out, keys.stride(0), size, min(count, size), kv_heads, dim, cosine, pow2(size),
        pow2(kv_heads), pow2(dim), num_warps=4,
    )  # fmt: skip
    return out


@fast_launch
@triton.jit
def _unit_representatives(
    keys, mass, out, head_stride, size, count, kv_heads, dim, COSINE: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    tokens, heads, channels = tl.arange(0, SIZE), tl.arange(0, HEADS), tl.arange(0, DIM)
    scores = tl.load(mass + unit * size + tokens, mask=tokens < size, other=float("-inf"))
    other = tl.load(mass + unit * size + tokens, mask=tokens < size, other=float("-inf"))
    is_later = tokens[None, :] > tokens[:, None]  # of equals, the later one is chosen
    equal = (other[None, :] == scores[:, None]) & (tokens < size)[None, :]
    ahead = (other[None, :] > scores[:, None]) | (equal & is_later)
    chosen = (tl.sum(ahead.to(tl.int32), 1) < count) & (tokens < size)
    order = tl.cumsum(chosen.to(tl.int32), 0) - 1
    inside = (heads < kv_heads)[:, None] & (channels < dim)[None, :]
    total = tl.zeros([HEADS, DIM], tl.float32)
    for i in range(0, count):
        token = unit * size + tl.sum(tl.where(chosen & (order == i), tokens, 0), 0)
        pointer = keys + heads[:, None].to(tl.int64) * head_stride + token * dim + channels[None, :]
        key = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
        if COSINE:
            key = key / tl.maximum(tl.sqrt(tl.sum(tl.sum(key * key, 1), 0)), 1e-12)
        total += key
    target = out + unit * kv_heads * dim + heads[:, None] * dim + channels[None, :]
    tl.store(target, total / count, mask=inside)


@fast_launch
@triton.jit(do_not_specialize=["m_stride"])
def _by_head(
    keys, mass, out, k_stride, m_stride, size, count, kv_heads, group, dim, COSINE: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of the vector of all query heads' tokens of that rank."""
    unit = tl.program_id(0).to(tl.int64)
    tokens, channels, row = tl.arange(0, SIZE), tl.arange(0, DIM), tl.arange(0, HEADS * GROUP)
    head, member = row // GROUP, row % GROUP
    valid = (head < kv_heads) & (member < group)
    pointer = mass + (head * group + member)[:, None].to(tl.int64) * m_stride + unit * size + tokens[None, :]
    remaining = tl.load(pointer, mask=valid[:, None] & (tokens < size)[None, :], other=float("-inf"))
    inside = valid[:, None] & (channels < dim)[None, :]
    total = tl.zeros([HEADS * GROUP, DIM], tl.float32)
    for _ in range(0, count):
        best = tl.max(remaining, 1)
        token = tl.max(tl.where(remaining == best[:, None], tokens[None, :], -1), 1)  # of equals, the later one
        remaining = tl.where(tokens[None, :] == token[:, None], float("-inf"), remaining)
        start = head.to(tl.int64) * k_stride + (unit * size + token) * dim
        key = tl.load(keys + start[:, None] + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        if COSINE:
            key = key / tl.maximum(tl.sqrt(tl.sum(tl.sum(key * key, 1), 0) / group), 1e-12)
        total += key
    mean = tl.sum(tl.reshape(total, [HEADS, GROUP, DIM]), 1) / (count * group)
    heads = tl.arange(0, HEADS)
    target = out + unit * kv_heads * dim + heads[:, None] * dim + channels[None, :]
    tl.store(target, mean, mask=(heads < kv_heads)[:, None] & (channels < dim)[None, :])
