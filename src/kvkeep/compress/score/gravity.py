"""Votes with the two centres of gravity, the first and the latest tokens, hidden (IntelLLM's CGE).

Deviation: the paper's algorithm and its section 4.3.1 swap the two modes; the section's explanation is followed. The
last `window` queries vote, where the paper says "the last query".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.compress.observe import from_end, visible
from kvkeep.compress.window import Size, check_window
from kvkeep.errors import BadParameter
from kvkeep.kernels.reference import probabilities
from kvkeep.types import Observation


@dataclass(frozen=True)
class WithoutGravity:
    window: int = 64
    head: int = 6
    near: Size = None
    mode: str = "global"

    def __post_init__(self) -> None:
        check_window(self.window)
        if self.head < 0:
            raise BadParameter(f"head_gravity={self.head} is negative; use 0 or more.")
        if self.mode not in ("global", "local"):
            raise BadParameter(f"mode='{self.mode}' is not known; use 'global' (long range) or 'local' (dialogue).")

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        queries = seen.queries[:, -self.window :]
        first = torch.arange(seen.tokens, device=seen.keys.device).expand(seen.kv_heads, -1) < self.head
        last = from_end(seen) < min(budget // 2 if self.near is None else self.near, budget)
        hidden = last if self.mode == "global" else first
        allowed = visible(seen, queries.shape[1]) & ~hidden[:, None]
        votes = (
            probabilities(queries, seen.keys, allowed, seen.scale, seen.softcap, seen.sinks, blind=True).sum(2).mean(1)
        )
        return votes.masked_fill(first | last, 0.0)
