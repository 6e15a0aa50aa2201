"""Queries and keys rotated to other positions; all layers of a forward pass share the angles."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvkeep.kernels.torch.rotation import Rotation

Angles = tuple[Tensor, Tensor]
Shift = tuple[int, int] | Tensor  # positions the first vector is moved by, and how many more each one after it; or each


@dataclass(eq=False)
class RopeShift:
    rotations: dict[int, Rotation | None]  # layer -> its rotation; None: it has no positions
    on_device: dict[tuple[int, torch.device], Rotation] = field(default_factory=dict)  # with frequencies on a device
    angles_of: dict[tuple, Angles] = field(default_factory=dict)  # of one shift

    def begin(self) -> None:
        """A forward pass begins: angles of the last one are of no use."""
        self.angles_of = {}

    def unrotate(self, layer: int, vectors: Tensor, first: int) -> Tensor:
        """Vectors at positions first, first + 1, … without their rotation. [heads, n, dim]"""
        return self._shift(layer, vectors, (-first, -1))

    def rotate(self, layer: int, vectors: Tensor, first: int) -> Tensor:
        """Unrotated vectors moved to positions first, first + 1, …"""
        return self._shift(layer, vectors, (first, 1))

    def rotate_to(self, layer: int, vectors: Tensor, first: int, position: int) -> Tensor:
        """Vectors at positions first, first + 1, … all moved to one position."""
        return self._shift(layer, vectors, (-first, -1), (position, 0))

    def move(self, layer: int, vectors: Tensor, *by: Tensor) -> Tensor:
        """Vectors moved by so many positions [n], one after the other; these are known to the device alone."""
        return self._shift(layer, vectors, *by)

    def angles_from_zero(self, layer: int, vectors: Tensor) -> Angles:
        """Cosines and sines of positions 0, 1, … [n, pairs]"""
        rotation = self.rotations[layer]
        assert rotation is not None
        return self._angles(rotation, (0, 1), vectors)

    def _shift(self, layer: int, vectors: Tensor, *shifts: Shift) -> Tensor:
        rotation = self.rotations.get(layer)
        if rotation is None or not vectors.shape[1]:
            return vectors
        for shift in shifts:
            vectors = rotation.apply(vectors, *self._angles(rotation, shift, vectors))
        return vectors

    def _angles(self, rotation: Rotation, shift: Shift, vectors: Tensor) -> Angles:
        n, device = vectors.shape[1], vectors.device
        name = id(rotation), shift, n, device
        if name not in self.angles_of:
            if (id(rotation), device) not in self.on_device:
                self.on_device[id(rotation), device] = rotation.to(device)
            by = shift if isinstance(shift, Tensor) else torch.arange(n, device=device) * shift[1] + shift[0]
            self.angles_of[name] = self.on_device[id(rotation), device].angles(by)
        return self.angles_of[name]


def is_whole(rotation: Rotation, dim: int) -> bool:
    """Every channel is rotated, paired with the one half a vector away."""
    return not rotation.interleaved and 2 * len(rotation.frequencies) == dim
