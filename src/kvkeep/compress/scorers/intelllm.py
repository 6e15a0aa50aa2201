"""Attention with the two centres of gravity, the first and the latest tokens, masked (IntelLLM's CGE).

Deviation: the paper's algorithm and its section 4.3.1 swap the two modes; the section's explanation is followed. The
last `window` queries count: the paper's algorithm sums over several and does not say how many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Count, Positive
from kvkeep.compress.attention import attention_received, distance_from_end
from kvkeep.types import PAD_POSITION, Observation


@dataclass(frozen=True)
class IntelLLMScorer(Checked):
    window: Positive = 64
    head: Count = 6
    near: Count | None = None
    mode: Literal["global", "local"] = "global"

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        near = min(budget // 2 if self.near is None else self.near, budget)
        first = torch.arange(seen.tokens, device=seen.keys.device).expand(seen.kv_heads, -1) < self.head
        last = distance_from_end(seen) < near
        scores = torch.zeros_like(first, dtype=torch.float32)
        start, tail = (0, near) if self.mode == "global" else (self.head, 0)
        lengths = tuple(max(0, n - start - tail) for n in seen.lengths)
        if longest := max(lengths):
            scores[:, start : start + longest] = self._scores(seen, start, tail, lengths)
        return scores.masked_fill(first | last, 0.0)

    def _scores(self, seen: Observation, start: int, tail: int, lengths: tuple[int, ...]) -> Tensor:
        """Attention over this range of each head's tokens only, as if the others were masked before the softmax."""
        part = slice(start, start + max(lengths))
        positions = seen.token_positions.masked_fill(distance_from_end(seen) < tail, PAD_POSITION)[:, part]
        shown = replace(seen, keys=seen.keys[:, part], token_positions=positions, lengths=lengths)
        return attention_received(shown, self.window)
