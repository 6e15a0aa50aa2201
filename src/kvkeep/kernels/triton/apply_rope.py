"""RoPE with given angles: one or two rotations in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, fast_launch, pow2

TOKENS = 8  # per program


def rotate(vectors: Tensor, *angles: tuple[Tensor, Tensor]) -> Tensor:
    """As in torch, for one or two rotations of vectors with last stride 1"""
    heads, n, dim = vectors.shape
    output = torch.empty(heads, n, dim, dtype=vectors.dtype, device=vectors.device)
    (cos, sin), (then_cos, then_sin) = angles[0], angles[-1]
    _rotate[heads, cdiv(n, TOKENS)](
        vectors, cos, sin, then_cos, then_sin, output, *vectors.stride()[:2], n, dim // 2, len(angles) == 2, TOKENS,
        pow2(dim // 2), num_warps=4,
    )  # fmt: skip
    return output


@fast_launch
@triton.jit(do_not_specialize=["n"])
def _rotate(
    vectors, cos, sin, then_cos, then_sin, output, head_stride, token_stride, n, half, TWICE: tl.constexpr,
    TOKENS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head, tokens = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    pairs = tl.arange(0, HALF)
    inside = (tokens < n)[:, None] & (pairs < half)[None, :]
    source = vectors + head * head_stride + tokens[:, None] * token_stride + pairs[None, :]
    a, b = tl.load(source, mask=inside), tl.load(source + half, mask=inside)
    angle = tokens[:, None] * 2 * half + half + pairs[None, :]  # the sines of the second half are not negated
    a, b = _rotate_pair(a, b, tl.load(cos + angle, mask=inside), tl.load(sin + angle, mask=inside))
    if TWICE:
        a, b = _rotate_pair(a, b, tl.load(then_cos + angle, mask=inside), tl.load(then_sin + angle, mask=inside))
    target = output + (head * n + tokens[:, None]) * 2 * half + pairs[None, :]
    tl.store(target, a, mask=inside)
    tl.store(target + half, b, mask=inside)


@triton.jit
def _rotate_pair(a, b, cos, sin):
    """In float32, rounded to the input dtype after each rotation."""
    first, second = a.to(tl.float32), b.to(tl.float32)
    return (first * cos - second * sin).to(a.dtype), (second * cos + first * sin).to(b.dtype)
