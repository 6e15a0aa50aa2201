"""Votes with the two centres of gravity, the first and the latest tokens, hidden (IntelLLM's CGE).

Deviation: the paper's algorithm and its section 4.3.1 swap the two modes; the section's explanation is followed. The
last `window` queries vote, where the paper says "the last query".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.compress.observe import from_end, received
from kvkeep.compress.window import Size, check_window
from kvkeep.errors import BadParameter
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
        near = min(budget // 2 if self.near is None else self.near, budget)
        first = torch.arange(seen.tokens, device=seen.keys.device).expand(seen.kv_heads, -1) < self.head
        last = from_end(seen) < near
        start, end = (0, max(0, seen.tokens - near)) if self.mode == "global" else (self.head, seen.tokens)
        votes = torch.zeros_like(first, dtype=torch.float32)
        if start < end:
            votes[:, start:end] = self._votes(seen, start, end)
        return votes.masked_fill(first | last, 0.0)

    def _votes(self, seen: Observation, start: int, end: int) -> Tensor:
        """Votes as if only these tokens were there: hiding a stretch before the softmax is leaving it out."""
        part = slice(start, end)
        lengths = tuple(max(0, min(n, end) - start) for n in seen.lengths)
        shown = replace(seen, keys=seen.keys[:, part], positions=seen.positions[:, part], lengths=lengths)
        return received(shown, self.window)
