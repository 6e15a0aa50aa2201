"""Who votes, and which tokens stay whatever the votes say."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.compress.attention import from_end
from kvkeep.compress.pooling import check_pool
from kvkeep.errors import BadParameter, BudgetTooSmall
from kvkeep.types import Observation, Step

Size = int | None  # None: a method's own rule, given the budget


def shrunk(window: Size, budget: int) -> int:
    """An observation window that is itself kept: at most half the budget. None is ProtoKV's: 32, or 8 below 128."""
    if window is None:
        window = 8 if budget < 128 else 32
    return min(window, budget // 2)


def check_window(window: Size, pool: int = 1) -> None:
    if window is not None and window < 1:
        raise BadParameter(f"window={window}: at least one query must vote; use 1 or more.")
    check_pool("pool", pool)


@dataclass(frozen=True)
class Guard:
    """Tokens that always stay: the first `sinks`, the last `recent`, and a voting `window` that shrinks to fit."""

    sinks: int = 0
    recent: Size = 0  # None: half the budget
    window: Size = 0
    yields: bool = False  # sinks and recent tokens give way to a small budget instead of refusing it

    def __post_init__(self) -> None:
        for name in ("sinks", "recent", "window"):
            if (getattr(self, name) or 0) < 0:
                raise BadParameter(f"{name}={getattr(self, name)} is negative; use 0 or more.")

    def ends(self, budget: int) -> tuple[int, int]:
        """How many of the first and of the last tokens stay."""
        recent = budget // 2 if self.recent is None else self.recent
        late = max(min(recent, budget) if self.yields else recent, shrunk(self.window, budget))
        return min(self.sinks, budget - late) if self.yields else self.sinks, late

    def size(self, budget: int) -> int:
        """How many tokens per key head this keeps of a budget."""
        return sum(self.ends(budget))

    def within(self, budget: int) -> Guard:
        """The same, giving way where this is a fraction of a short text: only budgets in tokens are refused."""
        return self if self.size(budget) <= budget else replace(self, yields=True)

    def check(self, budget: int, name: str) -> None:
        if self.size(budget) > budget:
            sinks, late = self.ends(budget)
            enough = budget
            while (size := self.size(enough)) > enough:  # the window grows with it, but never past the answer
                enough = size
            raise BudgetTooSmall(
                f"budget={budget} cannot hold the {sinks} sinks and {late} recent tokens '{name}' always keeps; "
                f"use a budget of {enough} or more."
            )

    def step(self, now: Step, budget: int) -> Tensor:
        """The same while decoding, told by position: a token of these is never dropped. [rows, kv_heads, n] bool"""
        sinks, late = self.ends(budget)
        stays = now.positions >= now.per_row([length - late for length in now.lengths])
        return stays | (now.positions < sinks) if sinks else stays

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        """[kv_heads, n] bool"""
        sinks, late = self.ends(budget)
        age = from_end(seen)
        first = torch.arange(seen.tokens, device=age.device) < sinks
        return (age >= 0) & (first | (age < late))
