"""The window's attention, by which ProtoKV scores clusters of keys (grouping/prototypes.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvkeep.arguments import Checked, Positive
from kvkeep.compress.attention import attention_received
from kvkeep.compress.guard import effective_window
from kvkeep.types import Observation


@dataclass(frozen=True)
class ProtoKVScorer(Checked):
    """Summed raw logits of the window, as the paper prints it; or its attention, as SnapKV's mechanism suggests."""

    window: Positive | None = None
    votes: Literal["raw", "softmax"] = "softmax"

    @property
    def signed(self) -> bool:
        """Whether scores may be negative."""
        return self.votes == "raw"

    @property
    def one_scale(self) -> bool:
        return self.votes == "softmax"

    def cache_key(self, budget: int) -> int:
        return max(1, effective_window(self.window, budget))

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        rows = max(1, effective_window(self.window, budget))
        if self.votes == "softmax":
            return attention_received(seen, rows)
        query = seen.queries[:, -rows:].float().sum(1).view(seen.kv_heads, -1, seen.keys.shape[-1]).mean(1)
        return (seen.keys.float() @ query[..., None]).squeeze(-1)
