"""RoPE with given angles, in torch."""

from __future__ import annotations

from torch import Tensor


def rotate(vectors: Tensor, *angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate vectors [heads, n, dim] in float32 by each (cosines, sines) [n, dim] in turn, rounding after each.

    Pairs lie half a vector apart: both halves of the cosines are equal, the first half of the sines is negated.
    """
    for cos, sin in angles:
        other = vectors.roll(vectors.shape[-1] // 2, -1)  # the other number of each pair
        vectors = (vectors * cos).add_(other * sin).to(vectors.dtype)
    return vectors
