"""RoPE in torch: with given angles, and with a layer's frequencies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.kernels.kernel_dispatch import KernelDispatch

KINDS = torch.float32, torch.float16, torch.bfloat16


def rotate(vectors: Tensor, *angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate vectors [heads, n, dim] in float32 by each (cosines, sines) [n, dim] in turn, rounding after each.

    Pairs lie half a vector apart: both halves of the cosines are equal, the first half of the sines is negated.
    """
    for cos, sin in angles:
        other = vectors.roll(vectors.shape[-1] // 2, -1)  # the other number of each pair
        vectors = (vectors * cos).add_(other * sin).to(vectors.dtype)
    return vectors


@dataclass(frozen=True)
class Rotation:
    """One layer's rotary embedding: frequencies, and which channels of a key form a pair."""

    frequencies: Tensor  # [pairs]
    interleaved: bool

    def to(self, device: torch.device) -> Rotation:
        return Rotation(self.frequencies.to(device), self.interleaved)

    def rotate(self, keys: Tensor, by: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Keys moved `by` positions, of another dtype if one is given. keys [.., n, dim], by [.., n]"""
        return self.apply(keys, *self.angles(by), dtype)

    def angles(self, by: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for moving `by` positions. [.., n, pairs]"""
        angle = by.to(torch.float32)[..., None] * self.frequencies.to(by.device, torch.float32)
        return angle.cos(), angle.sin()

    def apply(self, keys: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return apply_angles(keys, cos, sin, self.interleaved, dtype or keys.dtype)


def rotate_pairs(vectors: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype) -> Tensor:
    """Rotate the first 2 * pairs channels in float32; the others stay. vectors [.., n, dim], cos, sin [.., n, pairs]"""
    pairs = cos.shape[-1]
    paired, rest = vectors[..., : 2 * pairs].float(), vectors[..., 2 * pairs :]
    a, b = (paired[..., 0::2], paired[..., 1::2]) if interleaved else paired.chunk(2, -1)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    both = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([both.to(dtype), rest.to(dtype)], -1)


def _fits(vectors: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype) -> bool:
    """Of heads with as many tokens, whose angles are their own or the same."""
    kinds = vectors.dtype in KINDS and dtype in (torch.float32, vectors.dtype)
    if not kinds or vectors.ndim != 3 or not vectors.numel() or vectors.stride(-1) != 1 or vectors.requires_grad:
        return False
    angles_fit = cos.shape[:-1] in (vectors.shape[1:2], vectors.shape[:2])
    return angles_fit and cos.device == vectors.device and cos.is_contiguous() and sin.is_contiguous()


apply_angles = KernelDispatch("apply_angles", "apply_angles", _fits, rotate_pairs)
