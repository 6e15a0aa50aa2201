"""The logarithm of an expected attention weight: a quadratic form of every key, without the products in between.

A program holds one query head's matrix as three of 16 bits, and takes some blocks of keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import INTERPRETED, MIN_BLOCK, cdiv, dot, fast_launch, pow2

KEYS = 128  # at a time
BLOCKS = 8  # per program


def quadratic_form(keys: Tensor, matrices: Tensor, vectors: Tensor) -> Tensor:
    """As in the reference, for keys in bfloat16 with last stride 1"""
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
