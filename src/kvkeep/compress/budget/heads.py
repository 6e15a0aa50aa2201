"""Head budgets: (scores, forced, lengths, budget, units) -> tokens per KV head.

scores [kv_heads, n], -inf beyond a head's length; forced [kv_heads, n]: tokens that are always kept; units: groups of
tokens selected whole, None for single tokens. One with `counts` also says them on the device, given each token's rank.

One budget for all KV heads of all layers: their tokens compete by score, and layers come one after the other. A token
that is not among the best `total` of the layers so far will not be among the best of all, so no more than those need be
held: what is kept is exact, and memory is bounded by what will be kept and one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Share
from kvkeep.compress.budget.coverage import Needed, amounts, covered
from kvkeep.compress.protocols import HeadAllocator
from kvkeep.errors import BadParameter
from kvkeep.kernels.dispatch import top_counts
from kvkeep.kernels.torch.ranking import (
    INF,
    Units,
    all_best_first,
    inverse,
    ranked,
    token_major,
    top_counts_of_layers,
)
from kvkeep.types import PAD_POSITION, Tokens


@dataclass(frozen=True)
class EqualHeads:
    needs_scores = False

    def __call__(
        self, scores: Tensor, forced: Tensor, lengths: Sequence[int], budget: int, units: Units | None = None
    ) -> list[int]:
        return [min(budget, n) for n in lengths]


@dataclass(frozen=True)
class AdaptiveHeads(Checked):
    """Ada-KV (arXiv:2407.11550): tokens of all heads compete by score; each head has a guaranteed floor.

    Deviations: the floor is `alpha` of an equal budget, taken by each head's best tokens before heads compete, where
    the authors' code mixes the two counts afterwards; both conserve the total. With units, a token competes by its
    unit's score, then by its own, as in the selection.
    """

    alpha: Share = 0.2
    needs_scores = True

    def __call__(
        self, scores: Tensor, forced: Tensor, lengths: Sequence[int], budget: int, units: Units | None = None
    ) -> list[int]:
        order = ranked(scores, forced, scores > -INF, units)
        return self.counts(scores, forced, lengths, budget, units, inverse(order)).tolist()

    def counts(
        self, scores: Tensor, forced: Tensor, lengths: Sequence[int], budget: int, units: Units | None, rank: Tensor,
        needed: Needed | None = None,
    ) -> Tensor:  # fmt: skip
        """The same on the device, given the place of each token in its head's order. [kv_heads]

        needed: no more than is needed of all heads
        """
        member, unit_scores = (None, None) if units is None else (units.member, units.scores)
        total = min(len(lengths) * budget, sum(lengths))
        if needed is not None:
            ordered = all_best_first(scores, forced, member, unit_scores)
            count = int(needed.count(token_major(amounts(scores, ~forced))[ordered]))
            total = min(total, max(count, int(forced.sum())))
            budget = total // len(lengths)
        return top_counts(scores, rank, self.sure(forced, budget), total, member, unit_scores)

    def sure(self, forced: Tensor, budget: int) -> Tensor:
        """Tokens that each head is sure of: forced ones, and its best others. [kv_heads]"""
        count = forced.sum(1, dtype=torch.float64)
        return count + (self.alpha * (budget - count).clamp_min(0)).floor()


@dataclass(frozen=True)
class HeadsOfLayers(AdaptiveHeads):
    """The KV heads of several layers, one layer after the other: those of each layer compete among themselves."""

    layers: int = 1

    def counts(
        self, scores: Tensor, forced: Tensor, lengths: Sequence[int], budget: int, units: Units | None, rank: Tensor,
        needed: Needed | None = None,
    ) -> Tensor:  # fmt: skip
        """Every layer keeps as many; its KV heads share them as those of one layer do."""
        assert needed is None  # in decode, the budget alone decides
        by_unit = (None, None) if units is None else (units.member, units.scores)
        total = len(lengths) * budget // self.layers
        return top_counts_of_layers(self.layers, scores, rank, self.sure(forced, budget), total, *by_unit)


@dataclass(frozen=True)
class Threshold(Checked):
    """Each head keeps its forced tokens and, within its budget, those that score above tau: fewer may be kept.

    With units, they are as many tokens, of the best units.
    """

    heads: HeadAllocator
    tau: float = 0.001
    needs_scores = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self.heads, "across_layers", False):
            raise BadParameter("+threshold cannot work with one budget for all layers: their tokens compete by rank.")

    def __call__(
        self, scores: Tensor, forced: Tensor, lengths: Sequence[int], budget: int, units: Units | None = None
    ) -> list[int]:
        most = self.heads(scores, forced, lengths, budget, units)
        above = ((scores > self.tau) | forced).sum(1).tolist()
        return [min(pair) for pair in zip(most, above, strict=True)]


@dataclass(frozen=True)
class SharedBudget(AdaptiveHeads):
    """Heads of all layers compete; each is sure of `alpha` of an equal budget, its forced tokens included.

    Where one layer is all there is (`kvkeep.select`), or not across_layers, its heads compete, as in +adakv.
    """

    alpha: Share = 0.0
    across_layers: bool = True
    yields: bool = False  # budget="auto", which is not known before, does without the floor instead of being refused

    def sure(self, forced: Tensor, budget: int) -> Tensor:
        return forced.sum(1, dtype=torch.float64).clamp_min(int(self.alpha * budget + 1e-9))


@dataclass(frozen=True)
class Candidates:
    """One layer's tokens that may be kept, head by head, each with what it competes by."""

    tokens: Tokens  # [m, …]
    head: Tensor  # [m]
    rank: Tensor  # [m] the token's place in its head's order
    scores: Tensor  # [m] inf: kept for sure
    unit_scores: Tensor | None  # [m] of its unit: compared first
    kv_heads: int
    whole: Tensor | None = None  # sum of the layer's scores, those of evicted tokens, too, if a share of it is kept

    @classmethod
    def of(
        cls, tokens: Tokens, scores: Tensor, rank: Tensor, sure: Tensor, units: Units | None,
        whole: Tensor | None = None, padded: bool = False,
    ) -> Candidates:  # fmt: skip
        """scores, rank [kv_heads, n], tokens [kv_heads, n, …]; sure [kv_heads]: the first so many of each order

        padded: some tokens are padding, which is left out
        """
        kv_heads, n = scores.shape
        head = torch.arange(kv_heads, device=scores.device)[:, None].expand(-1, n)
        reserved = rank < sure[:, None]
        unit_scores = None if units is None else units.scores.gather(1, units.member).masked_fill(reserved, INF)
        each = cls(tokens, head, rank, scores.float().masked_fill(reserved, INF), unit_scores, kv_heads, whole)
        real = tokens.token_positions != PAD_POSITION
        return each.map(lambda part: part[real] if padded else part.flatten(0, 1))

    def map(self, change: Callable[[Tensor], Tensor]) -> Candidates:
        """Apply one function to every tensor."""
        head, rank, scores = (change(part) for part in (self.head, self.rank, self.scores))
        unit_scores = None if self.unit_scores is None else change(self.unit_scores)
        return Candidates(self.tokens.map(change), head, rank, scores, unit_scores, self.kv_heads, self.whole)

    def __len__(self) -> int:
        return len(self.rank)

    def first(self, counts: Tensor) -> Candidates:
        """The first `counts` of each head's order; the others are freed. counts [kv_heads]"""
        left = (self.rank < counts.to(self.rank.device)[self.head]).nonzero()[:, 0]
        return self.map(lambda part: part[left])

    def heads(self) -> list[Tokens]:
        """The tokens of each KV head."""
        ends = torch.bincount(self.head, minlength=self.kv_heads).cumsum(0).tolist()
        return [self.tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def best_of(layers: Sequence[Candidates], total: int, needed: Needed | None = None) -> list[Candidates]:
    """The best `total` tokens of all layers. Ties go to the later token, then the lower head, then the lower layer.

    needed: no more than is needed of all layers
    """
    if sum(map(len, layers)) <= total and needed is None:
        return list(layers)
    device = layers[0].rank.device
    layer = torch.cat([torch.full_like(each.head, i).to(device) for i, each in enumerate(layers)])
    head, position, scores = (
        torch.cat([part.to(device) for part in parts])
        for parts in zip(*((each.head, each.tokens.token_positions, each.scores) for each in layers), strict=True)
    )
    order = (((PAD_POSITION - position.long()) << 24) + (head << 12) + layer).argsort()
    order = order[scores[order].sort(descending=True, stable=True).indices]
    if layers[0].unit_scores is not None:
        units = torch.cat([each.unit_scores.to(device) for each in layers if each.unit_scores is not None])
        order = order[units[order].sort(descending=True, stable=True).indices]
    if needed is not None:
        count = int(needed.count(amounts(scores[order]), sum_of(layers).to(device)))
        total = min(total, max(count, int((scores == INF).sum())))
    winners, heads = order[:total], max(each.kv_heads for each in layers)
    counts = torch.bincount(layer[winners] * heads + head[winners], minlength=len(layers) * heads)
    return [each.first(count) for each, count in zip(layers, counts.view(len(layers), heads), strict=True)]


def sum_of(layers: Sequence[Candidates]) -> Tensor:
    """Sum the scores of all layers."""
    return torch.stack([each.whole.cpu() for each in layers if each.whole is not None]).sum()


def coverage_of(layers: Sequence[Candidates]) -> float:
    """The share of all layers' scores that what is left of them makes up."""
    return covered(torch.stack([amounts(each.scores).sum().cpu() for each in layers]).sum(), sum_of(layers))
