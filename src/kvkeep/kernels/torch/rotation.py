"""A layer's rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import apply_angles


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
