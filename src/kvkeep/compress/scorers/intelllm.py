"""Votes with the two centres of gravity, the first and the latest tokens, hidden (IntelLLM's CGE).

Deviation: the paper's algorithm and its section 4.3.1 swap the two modes; the section's explanation is followed. The
last `window` queries vote, where the paper says "the last query".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.compress.attention import from_end, received
from kvkeep.compress.guard import Size, check_window
from kvkeep.errors import BadParameter
from kvkeep.types import NOWHERE, Observation


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
        votes = torch.zeros_like(first, dtype=torch.float32)
        start, tail = (0, near) if self.mode == "global" else (self.head, 0)
        lengths = tuple(max(0, n - start - tail) for n in seen.lengths)
        if longest := max(lengths):
            votes[:, start : start + longest] = self._votes(seen, start, lengths)
        return votes.masked_fill(first | last, 0.0)

    def _votes(self, seen: Observation, start: int, lengths: tuple[int, ...]) -> Tensor:
        """Votes as if only these tokens of each head were there: hiding some before the softmax is leaving them out."""
        part = slice(start, start + max(lengths))
        shown = replace(seen, keys=seen.keys[:, part], positions=seen.positions[:, part], lengths=lengths)
        gone = from_end(shown) < 0
        return received(replace(shown, positions=shown.positions.masked_fill(gone, NOWHERE)), self.window)
