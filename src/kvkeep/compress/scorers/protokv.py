"""What a cluster of keys is worth to the window: ProtoKV's votes. The clusters are units (group/prototypes.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.attention import received
from kvkeep.compress.guard import Size, shrunk
from kvkeep.errors import BadParameter
from kvkeep.types import Observation


@dataclass(frozen=True)
class WindowLogits:
    """Raw logits of the window, summed, as the paper prints it; or its attention, as SnapKV's mechanism suggests."""

    window: Size = None
    votes: str = "softmax"

    @property
    def signed(self) -> bool:
        """Whether what nobody wants scores below zero."""
        return self.votes == "raw"

    def __post_init__(self) -> None:
        if self.votes not in ("raw", "softmax"):
            raise BadParameter(f"votes='{self.votes}' is not known; use 'raw' or 'softmax'.")

    def matters(self, budget: int) -> int:
        """All that scores depend on of a budget: the window. Never 0."""
        return max(1, shrunk(self.window, budget))

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        rows = max(1, shrunk(self.window, budget))
        if self.votes == "softmax":
            return received(seen, rows)
        together = seen.queries[:, -rows:].float().sum(1).view(seen.kv_heads, -1, seen.keys.shape[-1]).mean(1)
        return (seen.keys.float() @ together[..., None]).squeeze(-1)
