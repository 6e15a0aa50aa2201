"""Mean cosine of each key with its neighbours: a key is read once from memory, then from the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, fast_launch, pow2

TOKENS = 32  # per program


def key_similarity(keys: Tensor, token_mask: Tensor, kappa: int) -> Tensor:
    """As in the reference."""
    heads, n, dim = keys.shape
    keys, token_mask = keys.contiguous(), token_mask.contiguous()
    similarity = torch.empty(heads, n, dtype=torch.float32, device=keys.device)
    _key_similarity[cdiv(n, TOKENS), heads](
        keys, token_mask.view(torch.uint8), similarity, n, dim, kappa, TOKENS, pow2(dim), num_warps=4
    )
    return similarity


@fast_launch
@triton.jit(do_not_specialize=["n"])
def _key_similarity(keys, token_mask, similarity, n, dim, kappa, TOKENS: tl.constexpr, DIM: tl.constexpr):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens, channels = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DIM)
    keys_here, is_token_here = _unit_keys(keys, token_mask, tokens, channels, head, n, dim)
    total = tl.zeros([TOKENS], tl.float32)
    count = tl.zeros([TOKENS], tl.float32)
    for step in range(-kappa, kappa + 1):
        other, is_token_there = _unit_keys(keys, token_mask, tokens + step, channels, head, n, dim)
        total += tl.sum(keys_here * other, 1)
        count += is_token_there
    mean = tl.where(is_token_here > 0, total / tl.maximum(count, 1.0), 0.0)
    tl.store(similarity + head * n + tokens, mean, mask=tokens < n)


@triton.jit
def _unit_keys(keys, token_mask, tokens, channels, head, n, dim):
    """Keys scaled to length 1, zeros for padding; and 1 for tokens, 0 for padding."""
    within = (tokens >= 0) & (tokens < n)
    is_token = tl.load(token_mask + head * n + tokens, mask=within, other=0).to(tl.float32)
    inside = within[:, None] & (channels < dim)[None, :]
    rows = tl.load(keys + (head * n + tokens)[:, None] * dim + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(rows * rows, 1)), 1e-12)
    return rows * (is_token / norm)[:, None], is_token
