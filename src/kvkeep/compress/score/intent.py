"""Find where in the window the question begins, and let only the question vote (IntentKV).

Deviations: the mean over the question's rows instead of the sum, so that each query head of a group votes equally;
where attention never jumps, the whole window is the question.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.compress.observe import attention, received
from kvkeep.errors import BadParameter
from kvkeep.kernels.best import column_mass, distance
from kvkeep.kernels.reference import row_distance
from kvkeep.types import Observation

NO_JUMP = 1e-6  # smaller ones are rounding


@dataclass(frozen=True)
class Intent:
    window: int = 64
    smooth: int = 8
    intention: bool = True  # False: the whole window votes (the paper's ablation)

    def __post_init__(self) -> None:
        for name in ("window", "smooth"):
            if getattr(self, name) < 1:
                raise BadParameter(f"{name}={getattr(self, name)} must be 1 or more.")

    def matters(self, budget: int) -> int:
        """All that scores depend on of a budget: nothing."""
        return self.window

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        queries = seen.queries[:, -self.window :]
        if not self.intention:
            return received(seen, self.window) / queries.shape[1]
        if not distance.fast(queries, seen.keys):
            rows = attention(seen, self.window)  # [kv_heads, group, w, n]
            return torch.stack([_asked(row_distance(head, self.smooth), head).mean(0) for head in rows])
        how = seen.scale, seen.softcap, seen.sinks
        apart = distance(queries, seen.keys, seen.positions, seen.cursor, self.smooth, *how)
        return column_mass(queries, seen.keys, seen.positions, seen.cursor, *how, question(apart))


def _asked(apart: Tensor, rows: Tensor) -> Tensor:
    """Mean attention of the question's rows. [group, w], [group, w, n] -> [group, n]"""
    return (question(apart)[:, None, :] @ rows).squeeze(1)


def question(apart: Tensor) -> Tensor:
    """Equal weights for the rows from the biggest jump on, given how far each is from the first. [heads, w]"""
    jumps, first = apart.diff(dim=1), torch.zeros(len(apart), dtype=torch.long, device=apart.device)
    if jumps.shape[1]:
        highest, where = jumps.max(1)
        first = torch.where(highest > NO_JUMP, where, 0)
    asks = torch.arange(apart.shape[1], device=apart.device) >= first[:, None]
    return asks / asks.sum(1, keepdim=True)
