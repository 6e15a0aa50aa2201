"""The window's attention, by which ProtoKV scores clusters of keys (grouping/prototypes.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.attention import attention_received
from kvkeep.compress.guard import Size, effective_window
from kvkeep.errors import BadParameter
from kvkeep.types import Observation


@dataclass(frozen=True)
class ProtoKVScorer:
    """Summed raw logits of the window, as the paper prints it; or its attention, as SnapKV's mechanism suggests."""

    window: Size = None
    votes: str = "softmax"

    @property
    def signed(self) -> bool:
        """Whether scores may be negative."""
        return self.votes == "raw"

    @property
    def one_scale(self) -> bool:
        return self.votes == "softmax"

    def __post_init__(self) -> None:
        if self.votes not in ("raw", "softmax"):
            raise BadParameter(f"votes='{self.votes}' is not known; use 'raw' or 'softmax'.")

    def cache_key(self, budget: int) -> int:
        return max(1, effective_window(self.window, budget))

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        rows = max(1, effective_window(self.window, budget))
        if self.votes == "softmax":
            return attention_received(seen, rows)
        query = seen.queries[:, -rows:].float().sum(1).view(seen.kv_heads, -1, seen.keys.shape[-1]).mean(1)
        return (seen.keys.float() @ query[..., None]).squeeze(-1)
