"""What is known of units while they are away, and what they are worth to those who ask.

An index has `describe` (once, when tokens are put away) and `worth` (for every window of queries). Descriptions are
[heads, units, …] where every key head chooses for itself, [1, units, …] where all choose together; they are kept as the
type that keys have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.compress.retrieval.query import Moments, activation_bias, joined
from kvkeep.compress.select import best_first
from kvkeep.errors import BadParameter
from kvkeep.kernels.dispatch import Best, means

UNWANTED = float("-inf")


@dataclass(frozen=True)
class Leaving:
    """Tokens on their way out."""

    keys: Tensor  # [kv_heads, n, dim] without their position where keys are moved
    mass: Tensor | None  # [n] attention each got from the queries that followed it closely, or [heads, n] by query head
    member: Tensor | None  # [1 or kv_heads, n] unit of each; None: equal stretches
    count: int  # units
    room: Tensor | None = None  # [1 or kv_heads, units, …] where a description will be kept: who can, puts it there

    @property
    def units(self) -> Tensor:
        """`member`, whether anybody said or not."""
        if self.member is not None:
            return self.member
        n = self.keys.shape[1]
        return (torch.arange(n, device=self.keys.device) // (n // self.count))[None]


@dataclass(frozen=True)
class Asking:
    """A window of queries, turned to where the put-away keys can be seen from."""

    queries: Tensor  # [heads, w, dim]
    kv_heads: int
    scale: float
    moments: Moments | None = None  # of all queries so far, this window's included
    question: Tensor | None = None  # [x, kv_heads * dim] what the text is read for
    reading: bool = True  # a prompt; else a token that is being written
    probe: Tensor | None = None  # [kv_heads * dim] what they ask for, where somebody found out before


def _match(probe: Tensor, about: Tensor, cosine: bool) -> Tensor:
    """The product of a probe [dim], of length 1 if `cosine`, with what is known of units [1, units, dim]. [1, units]"""
    return about.float() @ (normalize(probe, dim=0) if cosine else probe)


def _speakers(keys: Tensor, mass: Tensor, units: int, count: int, cosine: bool, room: Tensor | None = None) -> Tensor:
    """The mean of the `count` tokens of each unit with most mass; the later of equals. Units are equal stretches.

    keys [kv_heads, n, dim], mass [n], or [heads, n]: a choice per query head (see `_by_head`)
    -> [1, units, kv_heads * dim] float32; `cosine`: the mean of their directions
    """
    if mass.dim() == 2:
        size = keys.shape[1] // units
        mass = mass.view(len(mass), units, size) if count < size else mass.new_zeros(len(mass), units, size)
        start = torch.arange(units, device=keys.device) * size
        return _by_head(keys, best_first(mass)[..., :count] + start[:, None], cosine)
    together = joined(keys, len(keys)).view(units, -1, len(keys) * keys.shape[-1])
    best = best_first(mass.view(together.shape[:2]))[:, :count].sort(1).values
    speak = together.gather(1, best[..., None].expand(-1, -1, together.shape[-1]))
    speak = normalize(speak, dim=-1) if cosine else speak
    total = speak.sum(1) if best.shape[1] <= 4 else sum(speak.unbind(1))  # one after the other in both cases
    return (total / best.shape[1])[None]


def _by_head(keys: Tensor, ranked: Tensor, cosine: bool) -> Tensor:
    """Mean over ranks of the vectors that query heads choose, averaged within each group, all key heads side by side.

    The r-th representative of a unit is the r-th choice of every query head, one after the other; with `cosine` it has
    length 1. Averaged within groups its product with a probe is the same, and the description as small as one choice's.
    Where all tokens of a unit speak nobody chooses, and a representative is the same token for all heads.
    keys [kv_heads, n, dim], ranked [heads, units, r] tokens, best first, -1: no more -> [1, units, kv_heads * dim]
    """
    kv_heads, _, dim = keys.shape
    index = ranked.clamp_min(0).view(kv_heads, -1, 1).expand(-1, -1, dim)
    speak = keys.gather(1, index).float().view(kv_heads, -1, *ranked.shape[1:], dim)  # [kv_heads, group, units, r, dim]
    together = speak.mean(1)
    if cosine:
        length = speak.square().sum(-1).mean(1).sum(0).sqrt()
        together = together / length.clamp_min(1e-12)[..., None]
    real = ranked[0] >= 0  # all heads choose as many
    total = sum((together * real[..., None]).unbind(2))
    return (total / real.sum(1)[:, None]).transpose(0, 1).reshape(1, ranked.shape[1], -1)


def _bounds(query: Tensor, bounds: Tensor) -> Tensor:
    """The most a key of each page can give a query, averaged over the group.

    query [heads, dim], bounds [kv_heads, units, 2, dim] (least and most) -> [kv_heads, units]
    """
    query = query.view(len(bounds), -1, query.shape[-1])
    low, high = bounds.float().unbind(2)
    most, least = query.clamp_min(0).mean(1)[:, None], query.clamp_max(0).mean(1)[:, None]
    return (most * high).sum(-1) + (least * low).sum(-1)


def _products(query: Tensor, about: Tensor) -> Tensor:
    """query [heads, dim], about [heads, units, dim] -> [heads, units]"""
    return (about.float() @ query[..., None])[..., 0]


match = Best("match", "chunks", plain=_match)
score_bounds = Best("score_bounds", "chunks", plain=_bounds)
score_chunks = Best("score_chunks", "chunks", plain=_products)
speakers = Best(
    "speakers",
    "describe",
    lambda keys, mass, units, *_: keys.shape[1] // units * (len(mass) if mass.dim() == 2 else 64) <= 2**14,
    _speakers,
)


@dataclass(frozen=True)
class Representatives:
    """A few tokens speak for a chunk: those that the tokens after them attended to most. InfLLM, Q-LLM, ActQKV.

    per_head: every query head chooses its own, as the authors' code does; else the mean over heads chooses for all
    """

    count: int = 4
    cosine: bool = False
    bias: bool = False  # the probe is made of surprising queries, not of all alike
    joins: bool = False  # while a prompt is read, the question's queries are part of every window
    weight: float = 0.0  # of the question beside the window, while reading and writing
    per_head: bool = False
    reverse: bool = False  # the least surprising queries count most
    wants_mass = True
    wants_sizes = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise BadParameter(f"representatives={self.count}: a chunk needs one at least.")

    @property
    def wants_moments(self) -> bool:
        return self.bias

    @property
    def asks(self) -> bool:
        """A question changes what is fetched."""
        return self.joins or self.weight > 0

    def describe(self, leaving: Leaving) -> Tensor:
        """The mean of a unit's representatives, all heads side by side. [1, units, kv_heads * dim]"""
        if leaving.member is None:
            return speakers(leaving.keys, leaving.mass, leaving.count, self.count, self.cosine, leaving.room)
        if self.per_head:
            ranked = ranked_in_units(leaving.mass, leaving.member[0], leaving.count, self.count)
            return _by_head(leaving.keys, ranked, self.cosine)
        keys, member = joined(leaving.keys, len(leaving.keys)), leaving.member[0]
        vectors = normalize(keys, dim=-1) if self.cosine else keys
        speaks = chosen_in_units(leaving.mass, member, leaving.count, self.count).to(vectors.dtype)
        total = vectors.new_zeros(leaving.count, vectors.shape[1])
        total.index_add_(0, member, vectors * speaks[:, None])
        size = vectors.new_zeros(leaving.count).index_add_(0, member, speaks)
        return (total / size[:, None])[None]

    def worth(self, asking: Asking, about: Tensor, sizes: Tensor) -> Tensor:
        """[1, units]"""
        probe = self._probe(asking) if asking.probe is None else asking.probe
        worth = match(probe, about, self.cosine)
        if asking.question is not None and self.weight:
            worth = worth + self.weight * match(asking.question.mean(0), about, self.cosine)
        return worth

    def _probe(self, asking: Asking) -> Tensor:
        window, question = joined(asking.queries, asking.kv_heads), asking.question
        if question is not None and asking.reading and self.joins:
            window = torch.cat([window, question])
        return activation_bias(window, asking.moments, self.reverse) if self.bias else window.mean(0)


@dataclass(frozen=True)
class EachToken:
    """Every token for itself: heads vote with their softmax over all that is away. TokenSelect.

    The keys speak for themselves: the index is where they lie.
    """

    wants_mass = wants_moments = wants_sizes = per_head = False

    def describe(self, leaving: Leaving) -> None:
        return None

    def worth(self, asking: Asking, about: Sequence[Tensor], sizes: Tensor) -> Tensor:
        """about: the keys put away, [kv_heads, n, dim] each -> [1, tokens]"""
        heads, _, dim = asking.queries.shape
        query = asking.queries.float().mean(1).view(asking.kv_heads, -1, dim) * asking.scale
        logits = torch.cat([query @ keys.to(query.device, torch.float32).transpose(1, 2) for keys in about], -1)
        return logits.softmax(-1).sum((0, 1))[None]


@dataclass(frozen=True)
class Bounds:
    """The least and the most each number of a page's keys can be: no product with a query exceeds it. Quest."""

    wants_mass = wants_moments = wants_sizes = per_head = False

    def describe(self, leaving: Leaving) -> Tensor:
        """[kv_heads, units, 2, dim]"""
        heads, n, dim = leaving.keys.shape
        member = leaving.units.expand(heads, -1)[..., None].expand(-1, -1, dim)
        keys = leaving.keys.float()
        ends = [
            keys.new_empty(heads, leaving.count, dim).scatter_reduce(1, member, keys, how, include_self=False)
            for how in ("amin", "amax")
        ]
        return torch.stack(ends, 2)

    def worth(self, asking: Asking, about: Tensor, sizes: Tensor) -> Tensor:
        """[kv_heads, units]"""
        return score_bounds(asking.queries.float().mean(1), about)


@dataclass(frozen=True)
class Centres:
    """The mean key of each unit. ClusterKV, SentenceKV, ProtoKV's recall; with `estimate`, Squeezed Attention.

    estimate: what one key of the unit would get of a softmax over all that is away
    threshold: units below this share of an even softmax are not worth fetching, budget or not
    """

    estimate: bool = False
    threshold: float = 0.0
    wants_mass = wants_moments = per_head = False

    @property
    def wants_sizes(self) -> bool:
        """What a unit is worth depends on how many tokens it has, and some may be worth nothing."""
        return self.estimate

    def describe(self, leaving: Leaving) -> Tensor:
        """[kv_heads, units, dim]"""
        return means(leaving.keys, leaving.units.expand(len(leaving.keys), -1), leaving.count)[0]

    def worth(self, asking: Asking, about: Tensor, sizes: Tensor) -> Tensor:
        """[kv_heads, units]"""
        query = asking.queries.float().mean(1).view(asking.kv_heads, -1, asking.queries.shape[-1])
        if not self.estimate:
            return score_chunks(query.mean(1), about) * asking.scale
        logits = query @ about.float().transpose(1, 2) * asking.scale
        per_key = logits - (logits + sizes.log()[:, None]).logsumexp(-1, keepdim=True)
        per_key = per_key.exp().mean(1)
        return per_key.masked_fill(per_key * sizes.sum(1, keepdim=True) < self.threshold, UNWANTED)


def chosen_in_units(scores: Tensor, member: Tensor, units: int, count: int) -> Tensor:
    """Which tokens are among the `count` best of their unit; the later of equals. scores, member [n] -> [n] bool"""
    order, rank = _unit_by_unit(scores, member, torch.bincount(member, minlength=units))
    return torch.empty_like(rank).scatter(0, order, rank) < count


def ranked_in_units(scores: Tensor, member: Tensor, units: int, count: int) -> Tensor:
    """The `count` best tokens of each unit, best first, the later of equals; -1 where it has fewer.

    A unit that has no more than `count` is ranked alike by all heads.
    scores [heads, n], member [n] -> [heads, units, count], or the size of the largest unit if that is less
    """
    sizes = torch.bincount(member, minlength=units)
    order, rank = _unit_by_unit(scores.masked_fill(sizes[member] <= count, 0), member, sizes)
    count = min(count, int(sizes.max()))
    place = torch.where(rank < count, member[order] * count + rank, units * count)  # others into one place too many
    table = order.new_full((len(scores), units * count + 1), -1).scatter(1, place, order)
    return table[:, :-1].view(len(scores), units, count)


def _unit_by_unit(scores: Tensor, member: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens unit after unit, best first, and the rank of each in its unit. scores [..., n] -> twice [..., n]"""
    best = best_first(scores)
    order = best.gather(-1, member[best].sort(dim=-1, stable=True).indices)
    first = sizes.cumsum(0) - sizes
    return order, torch.arange(len(member), device=order.device) - first[member[order]]
