"""Products of keys, without those in between in memory.

`key_similarity`: a key is read once from memory, then from the cache.
`quadratic_form`, the logarithm of an expected attention weight: a program holds one query head's matrix as three of 16
bits, and takes some blocks of keys.
"""

import torch
import triton
import triton.language as tl

from kvkeep.kernels.triton.common import cdiv, floats, kernel, padded, pow2
from kvkeep.kernels.triton.tiles import dot, load_rows

TOKENS = 32  # per program


def key_similarity(keys, token_mask, kappa):
    """Do what the reference does."""
    heads, n, dim = keys.shape
    keys, token_mask = keys.contiguous(), token_mask.contiguous()
    similarity = floats(keys, heads, n)
    _key_similarity[cdiv(n, TOKENS), heads](
        keys, token_mask.view(torch.uint8), similarity, n, dim, kappa, TOKENS, pow2(dim), num_warps=4
    )
    return similarity


@kernel(do_not_specialize=["n"])
def _key_similarity(keys, token_mask, similarity, n, dim, kappa, TOKENS: tl.constexpr, DIM: tl.constexpr):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    keys_here, is_token_here = _unit_keys(keys, token_mask, tokens, head, n, dim, DIM)
    total = tl.zeros([TOKENS], tl.float32)
    count = tl.zeros([TOKENS], tl.float32)
    for step in range(-kappa, kappa + 1):
        other, is_token_there = _unit_keys(keys, token_mask, tokens + step, head, n, dim, DIM)
        total += tl.sum(keys_here * other, 1)
        count += is_token_there
    mean = tl.where(is_token_here > 0, total / tl.maximum(count, 1.0), 0.0)
    tl.store(similarity + head * n + tokens, mean, mask=tokens < n)


@triton.jit
def _unit_keys(keys, token_mask, tokens, head, n, dim, DIM: tl.constexpr):
    """Keys scaled to length 1, zeros for padding; and 1 for tokens, 0 for padding."""
    within = (tokens >= 0) & (tokens < n)
    is_token = tl.load(token_mask + head * n + tokens, mask=within, other=0).to(tl.float32)
    rows = load_rows(keys + (head * n + tokens) * dim, within, dim, DIM).to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(rows * rows, 1)), 1e-12)
    return rows * (is_token / norm)[:, None], is_token


KEYS = 128  # at a time
BLOCKS = 8  # per program


def quadratic_form(keys, matrices, vectors):
    """Do what the reference does, for keys in bfloat16 with last stride 1"""
    (kv_heads, n, dim), heads = keys.shape, len(matrices)
    output = floats(keys, heads, n)
    _quadratic_form[heads * cdiv(n, KEYS * BLOCKS),](
        keys, matrices.contiguous(), vectors.contiguous(), output, *keys.stride()[:2], n, heads, heads // kv_heads, dim,
        padded(dim), KEYS, BLOCKS, num_warps=8, num_stages=2,
    )  # fmt: skip
    return output


@kernel(do_not_specialize=["n"])
def _quadratic_form(
    keys, matrices, vectors, output, key_head, key_token, n, heads, group, dim, DIM: tl.constexpr, KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    # heads of one group follow each other, and find their keys in the cache
    head, begin = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads * (KEYS * BLOCKS)
    channels = tl.arange(0, DIM)
    matrix = load_rows(matrices + head * dim * dim + channels * dim, channels < dim, dim, DIM)
    vector = tl.load(vectors + head * dim + channels, mask=channels < dim, other=0.0)
    for start in range(begin, tl.minimum(begin + KEYS * BLOCKS, n), KEYS):
        tokens = (start + tl.arange(0, KEYS)).to(tl.int64)
        k = load_rows(keys + head // group * key_head + tokens * key_token, tokens < n, dim, DIM)
        logits = tl.sum((dot(k, matrix) + vector[None, :]) * k.to(tl.float32), 1)
        tl.store(output + head * n + tokens, logits, mask=tokens < n)
