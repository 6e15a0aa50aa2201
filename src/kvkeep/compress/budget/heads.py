"""Head budgets: (scores, forced, lengths, budget, units) -> tokens per KV head.

scores [kv_heads, n], -inf beyond a head's length; forced [kv_heads, n]: tokens that are always kept; units: groups of
tokens selected whole, None for single tokens. One with `counts` also says them on the device, given each token's rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Share
from kvkeep.compress.budget.coverage import Needed, amounts
from kvkeep.compress.protocols import HeadAllocator
from kvkeep.errors import BadParameter
from kvkeep.kernels.dispatch import top_counts
from kvkeep.kernels.torch.ranking import INF, Units, all_best_first, inverse, ranked, token_major


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
        self, scores: Tensor, forced: Tensor, lengths: Sequence[int], budget: int, units: Units | None = None,
        order: Tensor | None = None,
    ) -> list[int]:  # fmt: skip
        if order is None:
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
