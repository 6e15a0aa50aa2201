"""Find where in the window the question begins, and let only the question vote (IntentKV).

The paper's section 5.2 can be read in two ways. `boundary="first"`: every smoothed row is compared with the first, and
the question begins before the biggest growth of that distance; the first growth, a whole step from 0, mostly wins.
`boundary="subsequent"`: every smoothed row is compared with the next, and the question begins before the biggest step;
rows smoothed with fewer successors than others do not count.
Deviations: the mean over the question's rows instead of the sum, so that each query head of a group votes equally;
where attention never jumps, the whole window is the question.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.compress.attention import attention, received
from kvkeep.errors import BadParameter
from kvkeep.kernels.dispatch import column_mass, distance
from kvkeep.kernels.torch.reference import row_distance
from kvkeep.types import Observation

NO_JUMP = 1e-6  # smaller ones are rounding
BOUNDARIES = ("first", "subsequent")


@dataclass(frozen=True)
class Intent:
    window: int = 64
    smooth: int = 8
    intention: bool = True  # False: the whole window votes (the paper's ablation)
    boundary: str = "subsequent"

    def __post_init__(self) -> None:
        if self.boundary not in BOUNDARIES:
            raise BadParameter(f"boundary={self.boundary!r} is not known; use {' or '.join(map(repr, BOUNDARIES))}.")
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
            return torch.stack([self._asked(head) for head in rows])
        how = seen.scale, seen.softcap, seen.sinks
        apart = distance(queries, seen.keys, seen.positions, seen.cursor, self.smooth, *how, self._stepwise)
        return column_mass(queries, seen.keys, seen.positions, seen.cursor, *how, question(self._jumps(apart)))

    @property
    def _stepwise(self) -> bool:
        return self.boundary == "subsequent"

    def _asked(self, rows: Tensor) -> Tensor:
        """Mean attention of the question's rows, over a group. [group, w, n] -> [n]"""
        return (self.asking(rows)[:, None, :] @ rows).squeeze(1).mean(0)

    def asking(self, rows: Tensor) -> Tensor:
        """Equal weights for the rows of each head's question, 0 for those before. [heads, w, n] -> [heads, w]"""
        return question(self._jumps(row_distance(rows, self.smooth, self._stepwise)))

    def _jumps(self, apart: Tensor) -> Tensor:
        """How far attention moves behind each row; 0 where it does not count. [heads, w] -> [heads, w]"""
        if not self._stepwise:
            return pad(apart.diff(dim=1), (0, 1))
        whole = max(1, apart.shape[1] - self.smooth + 1)  # rows smoothed with all of their successors
        return pad(apart[:, 1:whole], (0, apart.shape[1] - whole + 1))


def question(jumps: Tensor) -> Tensor:
    """Equal weights for the rows from the one before the biggest jump on, all where there is none. [heads, w]"""
    highest, where = jumps.max(1)
    first = torch.where(highest > NO_JUMP, where, 0)
    asks = torch.arange(jumps.shape[1], device=jumps.device) >= first[:, None]
    return asks / asks.sum(1, keepdim=True)
