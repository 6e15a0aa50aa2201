"""Where kept keys are made to stand. Only distances to the next query matter, and the next query always stands at the
true end of the text; so a placement moves keys, never queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.errors import BadParameter


@dataclass(frozen=True)
class Where:
    """What a placement may look at, for one key head of m kept tokens."""

    positions: Tensor  # [m] where the tokens stood in the text
    cursor: int  # tokens of text so far: the next query's place
    budget: int
    window: int  # the model's trained window


@dataclass(frozen=True)
class Contiguous:
    """Side by side, ending just before the next query: StreamingLLM's positions inside the cache."""

    def __call__(self, where: Where) -> Tensor:
        m = len(where.positions)
        return torch.arange(where.cursor - m, where.cursor, device=where.positions.device)


@dataclass(frozen=True)
class Gap:
    """The near window as it was; the far past side by side, its newest `gap` behind the current token (IntelLLM)."""

    near: int | None = None
    gap: int | None = None

    def __post_init__(self) -> None:
        if self.gap is not None and self.gap < 1:
            raise BadParameter(f"gap={self.gap} must be 1 or more; None chooses it from the model's window.")

    def __call__(self, where: Where) -> Tensor:
        m = len(where.positions)
        near = min(where.budget // 2 if self.near is None else self.near, m)
        far = m - near
        gap = self._gap(where, far, near)
        index = torch.arange(m, device=where.positions.device)
        return torch.where(index < far, where.cursor - gap - far + index, where.cursor - m + index)

    def _gap(self, where: Where, far: int, near: int) -> int:
        """None: three near windows, but no farther than any key of this text has been, nor than the model knows."""
        window = where.window
        if self.gap is None:
            return max(near, min(window - far, 3 * near, where.cursor - far))
        if self.gap + far > window:
            raise BadParameter(
                f"gap={self.gap} puts {far} far tokens up to {self.gap + far} away, beyond the window of {window}; "
                f"use a gap of {window - far} or less."
            )
        return self.gap


@dataclass(frozen=True)
class Capped:
    """No key farther than the trained window: LM-Infinite's distance limit."""

    def __call__(self, where: Where) -> Tensor:
        return where.positions.clamp_min(where.cursor - where.window)
