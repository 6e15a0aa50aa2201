"""Vectors turned to other positions, in plain torch."""

from __future__ import annotations

from torch import Tensor


def turned(vectors: Tensor, *angles: tuple[Tensor, Tensor]) -> Tensor:
    """Vectors rotated in float32, once for every pair of cosines and sines [n, dim], rounded each time. [heads, n, dim]

    Pairs lie half a vector apart: both halves of the cosines are the same, the first half of the sines is negative.
    """
    for cos, sin in angles:
        other = vectors.roll(vectors.shape[-1] // 2, -1)  # the other number of each pair
        vectors = (vectors * cos).add_(other * sin).to(vectors.dtype)
    return vectors
