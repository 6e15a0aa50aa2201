"""The newest queries vote with their attention: SnapKV (arXiv:2404.14469) and, with one voter, TOVA (arXiv:2401.06104).

Deviation: votes of the query heads that share a key head are averaged before pooling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvkeep.compress.observe import attention, from_end
from kvkeep.compress.window import shrunk
from kvkeep.errors import BadParameter
from kvkeep.types import Observation

INF = float("inf")


@dataclass(frozen=True)
class Votes:
    window: int = 64
    pool: int = 5
    pooling: str = "avg"
    kept: bool = True  # the window stays: it shrinks with the budget, and only tokens before it are pooled
    one_choice: bool = False  # all key heads of a layer share the average vote

    def __post_init__(self) -> None:
        if self.window < 1:
            raise BadParameter(f"window={self.window}: at least one query must vote; use 1 or more.")
        if self.pool < 1 or self.pool % 2 == 0:
            raise BadParameter(f"pool={self.pool} must be odd and positive, so that it has a middle; use 1 for none.")
        if self.pooling not in ("avg", "max"):
            raise BadParameter(f"pooling='{self.pooling}' is not known; use 'avg' or 'max'.")

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = shrunk(self.window, budget) if self.kept else self.window
        votes = attention(seen, max(1, window)).sum(2).mean(1)
        if self.one_choice:
            votes = votes.mean(0, keepdim=True).expand_as(votes)
        if self.pool == 1:
            return votes
        candidate = from_end(seen) >= (window if self.kept else 0)
        return torch.where(candidate, pool(votes, candidate, self.pool, self.pooling), votes)


def pool(scores: Tensor, among: Tensor, width: int, kind: str = "avg") -> Tensor:
    """Smooth scores over neighbours, counting only the tokens `among`. scores, among [kv_heads, n]"""
    if kind == "max":
        return max_pool1d(scores.masked_fill(~among, -INF), width, 1, width // 2)
    total, count = (avg_pool1d(x, width, 1, width // 2) for x in (scores * among, among.to(scores.dtype)))
    return total / count.clamp_min(1e-9)
