"""One vector that asks for a whole window of queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Mean and variance of every number over all vectors so far, brought up to date window by window."""

    count: int
    mean: Tensor  # [dim] float32
    variance: Tensor  # [dim]

    @classmethod
    def of(cls, vectors: Tensor) -> Moments:
        """vectors [n, dim]"""
        vectors = vectors.float()
        return cls(len(vectors), vectors.mean(0), vectors.var(0, unbiased=False))

    def joined(self, other: Moments) -> Moments:
        """Of both together, without ever summing squares: differences of large numbers lose everything."""
        count = self.count + other.count
        step = other.mean - self.mean
        mean = self.mean + step * (other.count / count)
        inside = self.variance * (self.count / count) + other.variance * (other.count / count)
        return Moments(count, mean, inside + step.square() * (self.count * other.count / count**2))


def joined(vectors: Tensor, kv_heads: int) -> Tensor:
    """All heads as one vector: queries averaged within their group, key heads side by side.

    [heads, n, dim] -> [n, kv_heads * dim]
    """
    heads, n, dim = vectors.shape
    if heads == kv_heads:
        return vectors.transpose(0, 1).reshape(n, -1).float()
    return vectors.float().view(kv_heads, -1, n, dim).mean(1).transpose(0, 1).reshape(n, -1)


def activation_bias(window: Tensor, moments: Moments) -> Tensor:
    """ActQKV's probe: queries weighted by how far they lie from the mean of all, in units of its variance.

    window [w, dim] -> [dim]; a number that never varied counts for nothing
    """
    still = moments.variance <= 1e-12 * moments.mean.square().clamp_min(1e-30)
    spread = moments.variance.masked_fill(still, torch.inf)
    surprise = ((window - moments.mean).square() / spread).sum(1)
    total = surprise.sum()
    weight = torch.where(total > 0, surprise / total.clamp_min(1e-30), 1 / len(window))
    return weight @ window
