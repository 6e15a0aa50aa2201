"""Who votes, and which tokens stay whatever the votes say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.compress.observe import from_end
from kvkeep.errors import BadParameter, BudgetTooSmall
from kvkeep.types import Observation


def shrunk(window: int, budget: int) -> int:
    """An observation window that is itself kept takes at most half the budget."""
    return min(window, budget // 2)


@dataclass(frozen=True)
class Guard:
    """Tokens that always stay: the first `sinks`, the last `recent`, and a voting `window` that shrinks to fit."""

    sinks: int = 0
    recent: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        for name in ("sinks", "recent", "window"):
            if getattr(self, name) < 0:
                raise BadParameter(f"{name}={getattr(self, name)} is negative; use 0 or more.")

    def size(self, budget: int) -> int:
        """How many tokens per key head this keeps of a budget."""
        return self.sinks + max(self.recent, shrunk(self.window, budget))

    def check(self, budget: int, name: str) -> None:
        if budget < (need := self.sinks + self.recent):
            raise BudgetTooSmall(
                f"budget={budget} cannot hold the {self.sinks} sinks and {self.recent} recent tokens '{name}' "
                f"always keeps; use a budget of {need} or more."
            )

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        """[kv_heads, n] bool"""
        age = from_end(seen)
        late = (age >= 0) & (age < max(self.recent, shrunk(self.window, budget)))
        early = torch.arange(seen.tokens, device=age.device) < self.sinks
        return late | (early & (age >= 0))
