"""Smoothing of scores over neighbouring tokens, masks included, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, fast_launch

BLOCK = 512  # tokens per program


def smooth(scores: Tensor, among: Tensor, width: int, kind: str) -> Tensor:
    """Smooth scores as torch/scoring.py does. scores [kv_heads, n] float32"""
    (heads, n), scores = scores.shape, scores.contiguous()
    among = (among if among.stride(-1) == 1 else among.contiguous()).view(torch.uint8)
    smoothed = torch.empty_like(scores)
    _smooth[cdiv(n, BLOCK), heads](
        scores, among, smoothed, n, among.stride(0), width, kind == "max", BLOCK, num_warps=4
    )
    return smoothed


@fast_launch
@triton.jit(do_not_specialize=["n", "among_row"])
def _smooth(scores, among, smoothed, n, among_row, WIDTH: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    head, tokens = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scores, among = scores + head * n, among + head * among_row
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for step in range(-(WIDTH // 2), WIDTH // 2 + 1):
        near = tokens + step
        within = (near >= 0) & (near < n)
        is_among = tl.load(among + near, mask=within, other=0) != 0
        value = tl.load(scores + near, mask=within, other=0.0)
        if LARGEST:
            highest = tl.maximum(highest, tl.where(is_among, value, float("-inf")))
        else:
            total += tl.where(is_among, value, 0.0)
            count += is_among.to(tl.float32)
    own = tl.load(scores + tokens, mask=tokens < n, other=0.0)
    is_among = tl.load(among + tokens, mask=tokens < n, other=0) != 0
    result = highest if LARGEST else (total / WIDTH) / tl.maximum(count / WIDTH, 1e-9)
    tl.store(smoothed + head * n + tokens, tl.where(is_among, result, own), mask=tokens < n)
