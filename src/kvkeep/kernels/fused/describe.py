"""Who speaks for a unit of neighbouring tokens, and the mean of these: one program per unit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.fused.common import power, quick


def speakers(keys: Tensor, mass: Tensor, units: int, count: int, cosine: bool, room: Tensor | None = None) -> Tensor:
    """As the reference's; room: where to put them."""
    kv_heads, n, dim = keys.shape
    keys = keys if keys.stride(1) == dim and keys.stride(2) == 1 else keys.contiguous()
    size = n // units
    about = room
    if about is None:
        about = torch.empty(1, units, kv_heads * dim, dtype=torch.float32, device=keys.device)
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
