"""One query vector for a whole window of queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import KernelDispatch


@dataclass(frozen=True)
class Moments:
    """Running mean and variance per channel over all vectors so far."""

    count: int
    mean: Tensor  # [dim] float32
    variance: Tensor  # [dim]

    @classmethod
    def of(cls, vectors: Tensor) -> Moments:
        """vectors [n, dim]"""
        vectors = vectors.float()
        return cls(len(vectors), vectors.mean(0), vectors.var(0, unbiased=False))

    def merge(self, other: Moments) -> Moments:
        """Of both together, without summing squares: differences of large sums lose all precision."""
        count = self.count + other.count
        step = other.mean - self.mean
        mean = self.mean + step * (other.count / count)
        inside = self.variance * (self.count / count) + other.variance * (other.count / count)
        return Moments(count, mean, inside + step.square() * (self.count * other.count / count**2))


def concat_heads(vectors: Tensor, kv_heads: int) -> Tensor:
    """All heads as one vector: queries averaged within their group, key heads concatenated.

    [heads, n, dim] -> [n, kv_heads * dim]
    """
    heads, n, dim = vectors.shape
    if heads == kv_heads:
        return vectors.transpose(0, 1).reshape(n, -1).float()
    return vectors.float().view(kv_heads, -1, n, dim).mean(1).transpose(0, 1).reshape(n, -1)


def activation_bias(window: Tensor, moments: Moments, reverse: bool = False) -> Tensor:
    """ActQKV's probe: queries weighted by their distance from the mean of all, in units of its variance.

    window [w, dim] -> [dim]; a channel that never varied counts for nothing
    reverse: weighted by 1 / that, the ablation of the paper's appendix D.3
    """
    still = moments.variance <= 1e-12 * moments.mean.square().clamp_min(1e-30)
    spread = moments.variance.masked_fill(still, torch.inf)
    surprise = ((window - moments.mean).square() / spread).sum(1)
    if reverse:
        surprise = 1 / surprise.clamp_min(1e-30)
    total = surprise.sum()
    weight = torch.where(total > 0, surprise / total.clamp_min(1e-30), 1 / len(window))
    return weight @ window


def _weighted_query(
    queries: Tensor,
    kv_heads: int,
    count: int,
    mean: Tensor | None,
    variance: Tensor | None,
    question: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of `count` queries updated with a window, and one query for the window and the question's queries.

    queries [heads, w, dim], question [x, kv_heads * dim] -> mean, variance, query [kv_heads * dim] float32
    """
    window = concat_heads(queries, kv_heads)
    moments = Moments.of(window)
    if mean is not None and variance is not None:
        moments = Moments(count, mean, variance).merge(moments)
    vectors = window if question is None else torch.cat([window, question])
    return moments.mean, moments.variance, activation_bias(vectors, moments, reverse)


def _mean_queries(queries: Tensor, kv_heads: int, moments: Tensor | None, weight: Tensor) -> Tensor:
    """`concat_heads` of one query per row; moments of all queries of a row, this one included, in place.

    queries [rows, heads, dim], moments [rows, 2, kv_heads * dim] (mean and variance), weight [rows]: of the new query
    among all, 0 leaves a row's moments as they are -> [rows, kv_heads * dim] float32
    """
    vectors = concat_heads(queries.transpose(0, 1), kv_heads)
    if moments is not None:
        (mean, variance), new = moments.unbind(1), weight[:, None]
        shift = vectors - mean
        variance.mul_(1 - new).addcmul_(shift.square(), new * (1 - new))
        mean.addcmul_(shift, new)
    return vectors


mean_queries = KernelDispatch("mean_queries", "row_queries", lambda queries, *_: queries.stride(-1) == 1, _mean_queries)
_dispatch_weighted_query = KernelDispatch(
    "weighted_query", "weighted_query", lambda queries, *_: queries.stride(-1) == 1, _weighted_query
)


def weighted_query(
    queries: Tensor, kv_heads: int, so_far: Moments | None, question: Tensor | None = None, reverse: bool = False
) -> tuple[Moments, Tensor]:
    """Moments of all queries, this window's included, and the window's query. Shapes as above"""
    count, mean, variance = (so_far.count, so_far.mean, so_far.variance) if so_far else (0, None, None)
    given = queries, kv_heads, count, mean, variance, question
    mean, variance, query = _weighted_query(*given, True) if reverse else _dispatch_weighted_query(*given)
    return Moments(count + queries.shape[1], mean, variance), query
