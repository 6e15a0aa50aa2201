"""RoPE in torch: with given angles, and with a layer's frequencies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

    def rotate(self, keys: Tensor, by: Tensor) -> Tensor:
        """Keys moved `by` positions. keys [.., n, dim], by [.., n]"""
        return self.apply(keys, *self.angles(by))

    def angles(self, by: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for moving `by` positions. [.., n, pairs]"""
        angle = by.to(torch.float32)[..., None] * self.frequencies.to(by.device, torch.float32)
        return angle.cos(), angle.sin()

    def apply(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = len(self.frequencies)
        paired, rest = keys[..., : 2 * pairs].float(), keys[..., 2 * pairs :]
        a, b = (paired[..., 0::2], paired[..., 1::2]) if self.interleaved else paired.chunk(2, -1)
        rotated = (a * cos - b * sin, b * cos + a * sin)
        both = torch.stack(rotated, -1).flatten(-2) if self.interleaved else torch.cat(rotated, -1)
        return torch.cat([both.to(keys.dtype), rest], -1)
