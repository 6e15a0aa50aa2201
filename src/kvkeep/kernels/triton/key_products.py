"""Products of keys, without those in between in memory.

`key_similarity`: a key is read once from memory, then from the cache.
`quadratic_form`, the logarithm of an expected attention weight: a program holds one query head's matrix as three of 16
bits, and takes some blocks of keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import INTERPRETED, MIN_BLOCK, cdiv, dot, fast_launch, pow2

TOKENS = 32  # per program


def key_similarity(keys: Tensor, token_mask: Tensor, kappa: int) -> Tensor:
    """Do what the reference does."""
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


KEYS = 128  # at a time
BLOCKS = 8  # per program


def quadratic_form(keys: Tensor, matrices: Tensor, vectors: Tensor) -> Tensor:
    """Do what the reference does, for keys in bfloat16 with last stride 1"""
    (kv_heads, n, dim), heads = keys.shape, len(matrices)
    output = keys.new_empty(heads, n, dtype=torch.float32)
    _quadratic_form[heads * cdiv(n, KEYS * BLOCKS),](
        keys, matrices.contiguous(), vectors.contiguous(), output, *keys.stride()[:2], n, heads, heads // kv_heads, dim,
        INTERPRETED, max(MIN_BLOCK, pow2(dim)), KEYS, BLOCKS, num_warps=8, num_stages=2,
    )  # fmt: skip
    return output


@fast_launch
@triton.jit(do_not_specialize=["n"])
def _quadratic_form(
    keys, matrices, vectors, output, key_head, key_token, n, heads, group, dim, WIDEN: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # heads of one group follow each other, and find their keys in the cache
    head, begin = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads * (KEYS * BLOCKS)
    channels = tl.arange(0, DIM)
    square = (channels < dim)[:, None] & (channels < dim)[None, :]
    where = matrices + head * dim * dim + channels[:, None] * dim + channels[None, :]
    matrix = tl.load(where, mask=square, other=0.0)
    vector = tl.load(vectors + head * dim + channels, mask=channels < dim, other=0.0)
    for start in range(begin, tl.minimum(begin + KEYS * BLOCKS, n), KEYS):
        tokens = (start + tl.arange(0, KEYS)).to(tl.int64)
        k = tl.load(
            keys + head // group * key_head + tokens[:, None] * key_token + channels[None, :],
            mask=(tokens < n)[:, None] & (channels < dim)[None, :], other=0.0,
        )  # fmt: skip
        logits = tl.sum((dot(k, matrix, WIDEN) + vector[None, :]) * k.to(tl.float32), 1)
        tl.store(output + head * n + tokens, logits, mask=tokens < n)
