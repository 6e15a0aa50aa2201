"""Smoothing scores over neighbouring tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvkeep.kernels.kernel_dispatch import KernelDispatch


def pool(scores: Tensor, among: Tensor, width: int, kind: str = "avg") -> Tensor:
    """Smooth the scores of the tokens `among`, with each other only. scores, among [kv_heads, n]"""
    return scores if width == 1 else _smooth(scores, among, width, kind)


def _with_torch(scores: Tensor, among: Tensor, width: int, kind: str) -> Tensor:
    if kind == "max":
        smooth = max_pool1d(scores.masked_fill(~among, float("-inf")), width, 1, width // 2)
    else:
        total, count = (avg_pool1d(x, width, 1, width // 2) for x in (scores * among, among.to(scores.dtype)))
        smooth = total / count.clamp_min(1e-9)
    return torch.where(among, smooth, scores)


def _is_float32(scores: Tensor, *_: object) -> bool:
    return scores.dtype == torch.float32


_smooth = KernelDispatch("smooth", "smoothing", _is_float32, _with_torch)
