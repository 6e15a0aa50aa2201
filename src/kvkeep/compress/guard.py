"""Tokens that are always kept: first tokens (sinks), recent tokens and the observation window."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Count
from kvkeep.compress.attention import distance_from_end
from kvkeep.errors import BudgetTooSmall
from kvkeep.types import Observation, Step

Size = int | None  # None: the method's rule, given the budget


def effective_window(window: Size, budget: int) -> int:
    """A kept observation window takes at most half the budget. None: ProtoKV's, 32, or 8 for budgets below 128."""
    if window is None:
        window = 8 if budget < 128 else 32
    return min(window, budget // 2)


@dataclass(frozen=True)
class Guard(Checked):
    """Always keeps the first `sinks`, the last `recent`, and an observation `window` that shrinks to fit."""

    sinks: Count = 0
    recent: Count | None = 0  # None: half the budget
    window: Count | None = 0
    shrink_to_fit: bool = False  # sinks and recent shrink to a small budget instead of raising

    def sinks_and_recent(self, budget: int) -> tuple[int, int]:
        """Numbers of first and of last tokens kept."""
        recent = budget // 2 if self.recent is None else self.recent
        last = max(min(recent, budget) if self.shrink_to_fit else recent, effective_window(self.window, budget))
        return min(self.sinks, budget - last) if self.shrink_to_fit else self.sinks, last

    def size(self, budget: int) -> int:
        """Tokens per KV head kept of a budget."""
        return sum(self.sinks_and_recent(budget))

    def fit_to(self, budget: int) -> Guard:
        """Shrinks where the budget is a fraction of a short text: only budgets in tokens are refused."""
        return self if self.size(budget) <= budget else replace(self, shrink_to_fit=True)

    def check(self, budget: int, name: str) -> None:
        if self.size(budget) > budget:
            sinks, recent = self.sinks_and_recent(budget)
            enough = budget
            while (size := self.size(enough)) > enough:  # the window grows with the budget, up to its own size
                enough = size
            raise BudgetTooSmall(
                f"budget={budget} cannot hold the {sinks} sinks and {recent} recent tokens '{name}' always keeps; "
                f"use a budget of {enough} or more."
            )

    def step(self, now: Step, budget: int) -> Tensor:
        """Tokens that a decode step never evicts, by position. [rows, kv_heads, n] bool"""
        sinks, recent = self.sinks_and_recent(budget)
        kept = now.token_positions >= (now.lengths - recent)[:, None, None]
        return kept | (now.token_positions < sinks) if sinks else kept

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        """[kv_heads, n] bool"""
        sinks, recent = self.sinks_and_recent(budget)
        age = distance_from_end(seen)
        first = torch.arange(seen.tokens, device=age.device) < sinks
        return (age >= 0) & (first | (age < recent))
