"""How alike each key is to its neighbours: every key is read once from memory, and a few times more from the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, power

TOKENS = 32  # at a time


def likeness(keys: Tensor, real: Tensor, kappa: int) -> Tensor:
    """As the reference's. keys [kv_heads, n, dim], real [kv_heads, n] bool -> [kv_heads, n] float32"""
    heads, n, dim = keys.shape
    keys, real = keys.contiguous(), real.contiguous()
    alike = torch.empty(heads, n, dtype=torch.float32, device=keys.device)
    _likeness[cdiv(n, TOKENS), heads](
        keys, real.view(torch.uint8), alike, n, dim, kappa, TOKENS, power(dim), num_warps=4
    )
    return alike


@triton.jit
def _likeness(keys, real, alike, n, dim, kappa, TOKENS: tl.constexpr, DIM: tl.constexpr):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens, channels = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DIM)
    mine, here = _units(keys, real, tokens, channels, head, n, dim)
    total = tl.zeros([TOKENS], tl.float32)
    count = tl.zeros([TOKENS], tl.float32)
    for step in range(-kappa, kappa + 1):
        other, there = _units(keys, real, tokens + step, channels, head, n, dim)
        total += tl.sum(mine * other, 1)
        count += there
    tl.store(alike + head * n + tokens, tl.where(here > 0, total / tl.maximum(count, 1.0), 0.0), mask=tokens < n)


@triton.jit
def _units(keys, real, tokens, channels, head, n, dim):
    """Keys of length 1, zeros for what is no token; and 1 for tokens, else 0."""
    within = (tokens >= 0) & (tokens < n)
    is_token = tl.load(real + head * n + tokens, mask=within, other=0).to(tl.float32)
    inside = within[:, None] & (channels < dim)[None, :]
    rows = tl.load(keys + (head * n + tokens)[:, None] * dim + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    size = tl.maximum(tl.sqrt(tl.sum(rows * rows, 1)), 1e-12)
    return rows * (is_token / size)[:, None], is_token
