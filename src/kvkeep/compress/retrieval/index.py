"""Index entries of offloaded units, the units' scores for queries, and which units are retrieved.

An index has `build` (once, when tokens are offloaded), `score` (for every window of queries), and says what it `needs`
(compress/protocols.py). Entries and scores are [heads, units, …] where every KV head selects for itself, [1, units, …]
where all select together; entries are stored in the dtype of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.arguments import Amount, Checked, Positive
from kvkeep.kernels import dispatch
from kvkeep.kernels.dispatch import means, score_page_bounds, score_representatives, score_tokens
from kvkeep.kernels.torch.ranking import best_first
from kvkeep.kernels.torch.retrieval_units import by_head, concat_heads
from kvkeep.types import Selection

NEG_INF = float("-inf")


@dataclass(frozen=True)
class OffloadedTokens:
    """Tokens that are being offloaded."""

    keys: Tensor  # [kv_heads, n, dim] unrotated where keys are moved
    mass: Tensor  # [n] attention each got from the queries that followed it closely, or [heads, n] by query head
    member: Tensor | None  # [1 or kv_heads, n] unit of each; None: uniform spans
    count: int  # units
    out: Tensor | None = None  # [1 or kv_heads, units, …] where the entries will be stored; `build` may write there

    @property
    def units(self) -> Tensor:
        """`member`, also for uniform spans."""
        if self.member is not None:
            return self.member
        n = self.keys.shape[1]
        return (torch.arange(n, device=self.keys.device) // (n // self.count))[None]


@dataclass(frozen=True)
class RetrievalQuery:
    """A window of queries, rotated to the position from which offloaded keys are seen."""

    queries: Tensor  # [heads, w, dim]
    kv_heads: int
    scale: float
    question: Tensor | None = None  # [x, kv_heads * dim] queries of the question, if known during prefill
    weighted: Tensor | None = None  # [kv_heads * dim] `weighted_query`, for an index that needs moments

    @cached_property
    def mean(self) -> Tensor:
        """[heads, dim]"""
        return self.queries.float().mean(1)

    @cached_property
    def vector(self) -> Tensor:
        """One vector for the window: queries averaged within their group, KV heads concatenated. [kv_heads * dim]"""
        return concat_heads(self.queries, self.kv_heads).mean(0) if self.weighted is None else self.weighted


@dataclass(frozen=True)
class RowQueries:
    """One decoded token's queries in each row of a pool, rotated as above, and how many units each row has."""

    queries: Tensor  # [rows, heads, dim]
    vectors: Tensor  # [rows, kv_heads * dim] averaged within their group, KV heads concatenated
    scale: float
    question: Tensor  # [rows, kv_heads * dim] mean query of the question; zeros where there is none
    units: Tensor  # [rows] scores of further units are undefined


@dataclass(frozen=True)
class Representatives(Checked):
    """A chunk is represented by the few tokens that those after them attended to most. InfLLM, Q-LLM, ActQKV.

    per_head: every query head chooses its own, as the authors' code does; else the mean over heads chooses for all
    """

    count: Positive = 4
    cosine: bool = False
    bias: bool = False  # queries are weighted by their surprise, not equally
    question_in_window: bool = False  # during prefill, the question's queries are part of every window
    weight: Amount = 0.0  # of the question's score beside the window's, in prefill and decoding
    per_head: bool = False
    reverse: bool = False  # the least surprising queries count most

    @cached_property
    def needs(self) -> frozenset[str]:
        asked = self.question_in_window or self.weight > 0
        optional = {"mass_per_head": self.per_head, "moments": self.bias, "question": asked}
        return frozenset({"mass", *(need for need, needed in optional.items() if needed)})

    def build(self, tokens: OffloadedTokens) -> Tensor:
        """The mean of a unit's representatives, heads concatenated. [1, units, kv_heads * dim]"""
        mass = tokens.mass if self.per_head else tokens.mass.expand(len(tokens.keys), -1)
        if tokens.member is None:
            return dispatch.unit_representatives(tokens.keys, mass, tokens.count, self.count, self.cosine, tokens.out)
        return by_head(tokens.keys, ranked_in_units(mass, tokens.member[0], tokens.count, self.count), self.cosine)

    def score(self, query: RetrievalQuery, unit_index: Tensor, sizes: Tensor) -> Tensor:
        """[1, units]"""
        scores = score_representatives(query.vector, unit_index, self.cosine)
        if query.question is not None and self.weight:
            scores = scores + self.weight * score_representatives(query.question.mean(0), unit_index, self.cosine)
        return scores

    def score_rows(self, query: RowQueries, entries: Tensor) -> Tensor:
        """`score` of one decoded token of each row; a single query's weight is 1. entries [rows, 1, most, …]"""
        scores = score_representatives(query.vectors, entries[:, 0], self.cosine, query.units)
        if self.weight:
            asked = score_representatives(query.question, entries[:, 0], self.cosine, query.units)
            scores = scores + self.weight * asked
        return scores[:, None]


@dataclass(frozen=True)
class EachToken:
    """Every token is a unit: heads vote with their softmax over all offloaded keys. TokenSelect.

    The offloaded keys themselves are the index.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"keys"})

    def build(self, tokens: OffloadedTokens) -> None:
        return None

    def score(self, query: RetrievalQuery, unit_index: Sequence[Tensor], sizes: Tensor) -> Tensor:
        """unit_index: the offloaded keys, [kv_heads, n, dim] each -> [1, tokens]"""
        heads, _, dim = query.queries.shape
        mean = query.mean.view(query.kv_heads, -1, dim) * query.scale
        logits = torch.cat([mean @ keys.to(mean.device).float().transpose(1, 2) for keys in unit_index], -1)
        return logits.softmax(-1).sum((0, 1))[None]

    def score_rows(self, query: RowQueries, entries: Tensor) -> Tensor:
        """entries [rows, kv_heads, most, dim] -> [rows, 1, most]"""
        return score_tokens(query.queries, entries, query.scale, query.units)[:, None]


@dataclass(frozen=True)
class Bounds:
    """Minimum and maximum of a page's keys, per channel: an upper bound of their product with a query. Quest."""

    needs: ClassVar[frozenset[str]] = frozenset()
    each_head: ClassVar[bool] = True  # scores units for every KV head by itself

    def build(self, tokens: OffloadedTokens) -> Tensor:
        """[kv_heads, units, 2, dim]"""
        heads, n, dim = tokens.keys.shape
        member = tokens.units.expand(heads, -1)[..., None].expand(-1, -1, dim)
        keys = tokens.keys.float()
        ends = [
            keys.new_empty(heads, tokens.count, dim).scatter_reduce(1, member, keys, reduction, include_self=False)
            for reduction in ("amin", "amax")
        ]
        return torch.stack(ends, 2)

    def score(self, query: RetrievalQuery, unit_index: Tensor, sizes: Tensor) -> Tensor:
        """[kv_heads, units]"""
        return score_page_bounds(query.mean, unit_index)

    def score_rows(self, query: RowQueries, entries: Tensor) -> Tensor:
        """entries [rows, kv_heads, most, 2, dim] -> [rows, kv_heads, most]"""
        scores = score_page_bounds(query.queries.float().flatten(0, 1), entries.flatten(0, 1), query.units)
        return scores.view(entries.shape[:3])


@dataclass(frozen=True)
class Centres(Checked):
    """The mean key of each unit. ClusterKV, SentenceKV, ProtoKV's recall; with `estimate`, Squeezed Attention.

    estimate: score a unit by what one of its keys would get of a softmax over all offloaded keys
    threshold: units below this share of a uniform softmax are never retrieved
    """

    estimate: bool = False
    threshold: Amount = 0.0
    each_head: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """With `estimate`, scores depend on the units' sizes, and some units may not be retrieved at all."""
        return frozenset({"sizes"} if self.estimate else ())

    def build(self, tokens: OffloadedTokens) -> Tensor:
        """[kv_heads, units, dim]"""
        return means(tokens.keys, tokens.units.expand(len(tokens.keys), -1), tokens.count)[0]

    def score(self, query: RetrievalQuery, unit_index: Tensor, sizes: Tensor) -> Tensor:
        """[kv_heads, units]"""
        mean = query.mean.view(query.kv_heads, -1, query.queries.shape[-1])
        if not self.estimate:
            return score_representatives(mean.mean(1), unit_index, False) * query.scale
        logits = mean @ unit_index.float().transpose(1, 2) * query.scale
        per_key = logits - (logits + sizes.log()[:, None]).logsumexp(-1, keepdim=True)
        per_key = per_key.exp().mean(1)
        return per_key.masked_fill(per_key * sizes.sum(1, keepdim=True) < self.threshold, NEG_INF)


def ranked_in_units(scores: Tensor, member: Tensor, units: int, count: int) -> Tensor:
    """The `count` best tokens of each unit, best first, the later of equals; -1 where it has fewer.

    A unit that has no more than `count` is ranked alike by all heads.
    scores [heads, n], member [n] -> [heads, units, count], or the size of the largest unit if that is less
    """
    sizes = torch.bincount(member, minlength=units)
    best = best_first(scores.masked_fill(sizes[member] <= count, 0))
    order = best.gather(1, member[best].sort(dim=1, stable=True).indices)  # tokens unit after unit, best first
    rank = torch.arange(len(member), device=order.device) - (sizes.cumsum(0) - sizes)[member[order]]
    count = min(count, int(sizes.max()))
    place = torch.where(rank < count, member[order] * count + rank, units * count)  # the others into one extra slot
    table = order.new_full((len(scores), units * count + 1), -1).scatter(1, place, order)
    return table[:, :-1].view(len(scores), units, count)


def by_unit(member: Tensor) -> tuple[Tensor, Tensor]:
    """The order that puts tokens unit after unit, and how many each unit has. [heads, n], [heads, units]"""
    sizes = torch.zeros(len(member), int(member.max()) + 1, dtype=torch.long, device=member.device)
    return member.sort(dim=1, stable=True).indices, sizes.scatter_add_(1, member, torch.ones_like(member))


def select_units(scores: Tensor, sizes: Tensor, quota: int, neighbours: float = 0.0) -> Selection:
    """Token numbers, counted in the order they were offloaded, unit after unit; the last unit is truncated to fit.

    scores, sizes [heads, units]; with neighbours, that share of the quota goes to units beside the best
    """
    eligible = sizes.masked_fill(scores == NEG_INF, 0).sum(1)
    quota = min(quota, int(eligible.max()))  # every head retrieves as much as the one with most
    order = best_first(scores)
    if neighbours:
        order = torch.stack([_with_neighbours(o, s, quota, neighbours) for o, s in zip(order, sizes, strict=True)])
    taken = sizes.gather(1, order).cumsum(1)
    slots = torch.arange(quota, device=scores.device).expand(len(scores), -1).contiguous()
    rank = torch.searchsorted(taken, slots, right=True)
    unit = order.gather(1, rank)
    starts = sizes.cumsum(1) - sizes
    before = taken.gather(1, rank) - sizes.gather(1, unit)
    index = starts.gather(1, unit) + slots - before
    return Selection(index.sort(1).values, (quota,) * len(scores))


def _with_neighbours(order: Tensor, sizes: Tensor, quota: int, share: float) -> Tensor:
    """The best units up to their share, then the units after and before each of them, then the rest."""
    best, room, counts = [], quota - int(share * quota), sizes.tolist()
    ranked = order.tolist()
    for unit in ranked:
        if room <= 0:
            break
        best.append(unit)
        room -= counts[unit]
    beside = [near for unit in best for near in (unit + 1, unit - 1) if 0 <= near < len(ranked)]
    return torch.tensor(list(dict.fromkeys([*best, *beside, *ranked])), device=order.device)
