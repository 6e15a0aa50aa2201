"""Vectors turned to other positions: one or two rotations in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, power, quick

TOKENS = 8  # of a program


def turned(vectors: Tensor, *angles: tuple[Tensor, Tensor]) -> Tensor:
    """As the reference's, for one or two rotations. vectors: of any strides but the last, which is 1"""
    heads, n, dim = vectors.shape
    output = torch.empty(heads, n, dim, dtype=vectors.dtype, device=vectors.device)
    (cos, sin), (then_cos, then_sin) = angles[0], angles[-1]
    _turned[heads, cdiv(n, TOKENS)](
        vectors, cos, sin, then_cos, then_sin, output, *vectors.stride()[:2], n, dim // 2, len(angles) == 2, TOKENS,
        power(dim // 2), num_warps=4,
    )  # fmt: skip
    return output


@quick
@triton.jit(do_not_specialize=["n"])
def _turned(
    vectors, cos, sin, then_cos, then_sin, output, apart, step, n, half, TWICE: tl.constexpr, TOKENS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    head, tokens = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    pairs = tl.arange(0, HALF)
    inside = (tokens < n)[:, None] & (pairs < half)[None, :]
    source = vectors + head * apart + tokens[:, None] * step + pairs[None, :]
    a, b = tl.load(source, mask=inside), tl.load(source + half, mask=inside)
    angle = tokens[:, None] * 2 * half + half + pairs[None, :]  # the second half has sines as they are
    a, b = _rotated(a, b, tl.load(cos + angle, mask=inside), tl.load(sin + angle, mask=inside))
    if TWICE:
        a, b = _rotated(a, b, tl.load(then_cos + angle, mask=inside), tl.load(then_sin + angle, mask=inside))
    target = output + (head * n + tokens[:, None]) * 2 * half + pairs[None, :]
    tl.store(target, a, mask=inside)
    tl.store(target + half, b, mask=inside)


@triton.jit
def _rotated(a, b, cos, sin):
    """In float32, and back: each rotation rounds."""
    first, second = a.to(tl.float32), b.to(tl.float32)
    return (first * cos - second * sin).to(a.dtype), (second * cos + first * sin).to(b.dtype)
