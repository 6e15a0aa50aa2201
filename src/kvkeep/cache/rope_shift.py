"""Queries and keys turned to other places; all layers of a forward pass share the angles."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import turned
from kvkeep.model.rope import Rotation

Angles = tuple[Tensor, Tensor]
By = tuple[int, int]  # how far the first vector is turned, and how much farther each one after it


class Turns:
    def __init__(self, rotations: dict[int, Rotation | None]) -> None:
        self.rotations = rotations  # layer -> its rotation; None: it knows no positions
        self.there: dict[tuple[int, torch.device], Rotation] = {}  # rotations with frequencies on a device
        self.of_way: dict[tuple, Angles] = {}
        self.known: dict[tuple, tuple[list[Angles], bool]] = {}  # several ways one after the other, and how to go them

    def begin(self) -> None:
        """A forward pass begins: angles of the last one are of no use."""
        self.of_way, self.known = {}, {}

    def back(self, layer: int, vectors: Tensor, first: int) -> Tensor:
        """Vectors that stand at first, first + 1, … as if they had no position. [heads, n, dim]"""
        return self._by(layer, vectors, (-first, -1))

    def to(self, layer: int, vectors: Tensor, first: int) -> Tensor:
        """Vectors without position as if they stood at first, first + 1, …"""
        return self._by(layer, vectors, (first, 1))

    def gathered(self, layer: int, vectors: Tensor, first: int, place: int) -> Tensor:
        """Vectors that stand at first, first + 1, … as if all stood at one place."""
        return self._by(layer, vectors, (-first, -1), (place, 0))

    def _by(self, layer: int, vectors: Tensor, *ways: By) -> Tensor:
        turn = self.rotations.get(layer)
        _, n, dim = vectors.shape
        if turn is None or not n:
            return vectors
        name = id(turn), ways, n, dim, vectors.device
        if name not in self.known:
            self.known[name] = [self._angles(turn, way, vectors) for way in ways], _whole(turn, vectors)
        angles, whole = self.known[name]
        if whole:
            return turned(vectors, *angles)
        for each in angles:
            vectors = turn.rotated(vectors, *each)
        return vectors

    def _angles(self, turn: Rotation, way: By, vectors: Tensor) -> Angles:
        """Cosines and sines, as `turned` takes them where it can."""
        (first, step), (_, n, dim), device = way, vectors.shape, vectors.device
        name = id(turn), way, n, dim, device
        if name not in self.of_way:
            if (id(turn), device) not in self.there:
                self.there[id(turn), device] = replace(turn, frequencies=turn.frequencies.to(device))
            by = torch.arange(n, device=device) * step + first
            cos, sin = self.there[id(turn), device].angles(by)
            both = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
            self.of_way[name] = both if _whole(turn, vectors) else (cos, sin)
        return self.of_way[name]


def _whole(turn: Rotation, vectors: Tensor) -> bool:
    """Every number of a vector turns, with one half a vector away."""
    return not turn.interleaved and 2 * len(turn.frequencies) == vectors.shape[-1]
