"""A window's query, and the representatives, scores and selection of offloaded units, in torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.kernels.torch.ranking import best_first


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
        """Merge both, without summing squares: differences of large sums lose all precision."""
        count = self.count + other.count
        step = other.mean - self.mean
        mean = self.mean + step * (other.count / count)
        inside = self.variance * (self.count / count) + other.variance * (other.count / count)
        return Moments(count, mean, inside + step.square() * (self.count * other.count / count**2))


def concat_heads(vectors: Tensor, kv_heads: int) -> Tensor:
    """All heads as one vector: queries averaged within their group, KV heads concatenated.

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


def weighted_query(
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


def mean_queries(queries: Tensor, kv_heads: int, moments: Tensor | None, weight: Tensor) -> Tensor:
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


def score_representatives(vector: Tensor, unit_index: Tensor, cosine: bool, units: Tensor | None = None) -> Tensor:
    """The product of a vector, normalized if `cosine`, with index entries; units: as in `RowQueries`.

    vector [dim] or [rows, dim], unit_index [rows, units, dim] -> [rows, units]
    """
    vector = normalize(vector, dim=-1) if cosine else vector
    return (unit_index.float() @ vector.view(-1, vector.shape[-1], 1))[..., 0]


def unit_representatives(
    keys: Tensor, mass: Tensor, units: int, count: int, cosine: bool, out: Tensor | None = None
) -> Tensor:
    """The mean of the `count` tokens of each unit with most mass; the later of equals. Units are uniform spans.

    keys [kv_heads, n, dim], mass [heads, n], or [kv_heads, n]: a choice of each (see `by_head`)
    -> [1, units, kv_heads * dim] float32; `cosine`: the mean of their directions
    """
    size = keys.shape[1] // units
    mass = mass.reshape(len(mass), units, size) if count < size else mass.new_zeros(len(mass), units, size)
    start = torch.arange(units, device=keys.device) * size
    return by_head(keys, best_first(mass)[..., :count] + start[:, None], cosine)


def by_head(keys: Tensor, ranked: Tensor, cosine: bool) -> Tensor:
    """Mean over ranks of the vectors that query heads choose, averaged within each group, KV heads concatenated.

    The r-th representative of a unit is the r-th choice of every query head, concatenated; with `cosine` it has length
    1. Averaging within groups leaves its product with a query unchanged, and the entry as small as one head's choice.
    Where all tokens of a unit are representatives, each is the same token for all heads.
    keys [kv_heads, n, dim], ranked [heads, units, r] tokens, best first, -1: no more -> [1, units, kv_heads * dim]
    """
    kv_heads, _, dim = keys.shape
    index = ranked.clamp_min(0).view(kv_heads, -1, 1).expand(-1, -1, dim)
    each = keys.gather(1, index).float().view(kv_heads, -1, *ranked.shape[1:], dim)  # [kv_heads, group, units, r, dim]
    mean = each.mean(1)
    if cosine:
        length = each.square().sum(-1).mean(1).sum(0).sqrt()
        mean = mean / length.clamp_min(1e-12)[..., None]
    valid = ranked[0] >= 0  # all heads choose as many
    total = sum((mean * valid[..., None]).unbind(2))
    return (total / valid.sum(1)[:, None]).transpose(0, 1).reshape(1, ranked.shape[1], -1)


def score_page_bounds(query: Tensor, bounds: Tensor, units: Tensor | None = None) -> Tensor:
    """Upper bound of a query's product with any key of each page, averaged over the group.

    query [heads, dim], bounds [kv_heads, units, 2, dim] (minimum and maximum) -> [kv_heads, units]
    """
    query = query.view(len(bounds), -1, query.shape[-1])
    low, high = bounds.float().unbind(2)
    positive, negative = query.clamp_min(0).mean(1)[:, None], query.clamp_max(0).mean(1)[:, None]
    return (positive * high).sum(-1) + (negative * low).sum(-1)


def score_tokens(queries: Tensor, keys: Tensor, scale: float, units: Tensor) -> Tensor:
    """Softmax of each head over its row's first `units` keys, summed over heads.

    queries [rows, heads, dim], keys [rows, kv_heads, most, dim], units [rows] -> [rows, most] float32
    """
    rows, kv_heads, most, dim = keys.shape
    scores = queries.new_zeros(rows, most, dtype=torch.float32)
    grouped = (queries.float() * scale).view(rows, kv_heads, -1, dim)
    for row, n in enumerate(units.tolist()):
        scores[row, :n] = (grouped[row] @ keys[row, :, :n].float().transpose(1, 2)).softmax(-1).sum((0, 1))
    return scores


def select_uniform_units(scores: Tensor, size: int, quota: int) -> Tensor:
    """`select_units` where units are uniform, none scores NEG_INF and the quota is whole units. [heads, quota]"""
    return unit_tokens(best_first(scores)[:, : quota // size].sort(1).values, size)


def unit_tokens(units: Tensor, size: int) -> Tensor:
    """The tokens of uniform units. [heads, n] -> [heads, n * size]"""
    return (units[..., None] * size + torch.arange(size, device=units.device)).flatten(1)


def select_counted(scores: Tensor, units: Tensor, counts: Tensor, selected: Tensor) -> None:
    """The `counts` best of each row's first `units` units, ascending; a row without units is left as it is.

    scores [rows, lists, most] float32, units and counts [rows] -> selected [rows, lists, room] int32, in place
    """
    for row, (n, count) in enumerate(zip(units.tolist(), counts.tolist(), strict=True)):
        if n:
            selected[row, :, :count] = best_first(scores[row, :, :n])[:, :count].sort(1).values


def share_quota(
    scores: Tensor, units: Tensor, left: Tensor, densities: Tensor, layer: int, most: int, reverse: bool = False
) -> Tensor:
    """`density_share` in units, for all rows; their quotas left [rows] and the layer's mean density, in place.

    scores [rows, most units], units [rows]: how many count, 0 leaves a row as it is; densities [rows, layers, 2]
    float64: mean and number of steps, NaN where nothing is known; most: units a layer may get -> [rows]
    """
    shares = torch.zeros_like(left)
    for row, (n, quota, known) in enumerate(zip(units.tolist(), left.tolist(), densities.tolist(), strict=True)):
        if not n:
            continue
        now, (mean, steps) = float(density(scores[row, :n], reverse)), known[layer]
        later = [now if isnan(mean) else mean for mean, _ in known[layer + 1 :]]
        shares[row] = share = min(density_share(now, later, quota), most)
        left[row] = quota - share
        steps = 0 if isnan(mean) else steps
        mean = ((mean if steps else 0.0) * steps + now) / (steps + 1)
        densities[row, layer] = torch.tensor([mean, steps + 1], dtype=torch.float64)
    return shares


def density_share(now: float, later: list[float], left: int) -> int:
    """ActQKV: this layer's part of the units left, by the density of its scores; never more than left."""
    total = now + sum(later)
    part = now / total if total > 0 else 1 / (1 + len(later))
    return min(left, int(part * left + 1e-9))


def density(scores: Tensor, reverse: bool = False) -> Tensor:
    """What a layer's share is proportional to: the entropy of its scores; reverse: 1 / that (ActQKV, appendix D.3).

    scores [units] -> []
    """
    entropy = torch.special.entr(scores.softmax(0)).sum()
    return 1 / entropy.clamp_min(1e-9) if reverse else entropy
