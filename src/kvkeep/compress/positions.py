"""RoPE positions of kept keys. Only distances to the next query matter, and the next query is always at the true end of
the text; so a placement moves keys, never queries.

Every token that follows is one farther away. So keys are placed with room for the next tokens (`reserved`), and moved
on before a query would be farther from one of them than the trained context allows (`move_within`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Count, Positive
from kvkeep.errors import BadParameter

ROOM = 1024  # tokens


@dataclass(frozen=True)
class PlacementInput:
    """Input of a placement, for one KV head of m kept tokens, or one of each of several rows."""

    token_positions: Tensor  # [.., m] indices of the tokens in the text
    seq_len: int | Tensor  # tokens of text so far: position of the next query; of rows, [.., 1]
    budget: int
    context_length: int  # the model's, as it was trained


def reserved(context_length: int) -> int:
    """The number of tokens that may follow before keys are placed again."""
    return min(ROOM, max(1, context_length // 8))


def move_within(positions: Tensor, lowest: int | Tensor) -> Tensor:
    """Move the first keys on, as one block, so that none is before `lowest`. positions ascending [.., m]"""
    order = torch.arange(positions.shape[-1], device=positions.device)
    offset = torch.minimum(positions - positions[..., :1], order)
    return torch.maximum(positions, lowest + offset)


@dataclass(frozen=True)
class Contiguous:
    """Consecutive positions that end just before the next query: StreamingLLM's positions inside the cache."""

    def __call__(self, where: PlacementInput) -> Tensor:
        m = where.token_positions.shape[-1]
        return torch.arange(m, device=where.token_positions.device) + (where.seq_len - m)


@dataclass(frozen=True)
class Gap(Checked):
    """Near tokens keep their positions; far ones are consecutive, the newest `gap` before the next query (IntelLLM)."""

    near: Count | None = None
    gap: Positive | None = None

    def __call__(self, where: PlacementInput) -> Tensor:
        m = where.token_positions.shape[-1]
        near = min(where.budget // 2 if self.near is None else self.near, m)
        far = m - near
        gap = self._gap(where, far, near)
        index = torch.arange(m, device=where.token_positions.device)
        return torch.where(index < far, where.seq_len - gap - far + index, where.seq_len - m + index)

    def _gap(self, where: PlacementInput, far: int, near: int) -> int | Tensor:
        """None: three near windows, but no farther than any key of this text has been, nor than the trained context."""
        if self.gap is None:
            farthest = min(where.context_length - far, 3 * near)
            return torch.as_tensor(where.seq_len - far).clamp_max(farthest).clamp_min(near)
        if self.gap + far > where.context_length:
            raise BadParameter(
                f"gap={self.gap} puts {far} far tokens up to {self.gap + far} away, beyond the context length of "
                f"{where.context_length}; use a gap of {where.context_length - far} or less."
            )
        return self.gap


@dataclass(frozen=True)
class Capped:
    """No key farther than the trained context length: LM-Infinite's distance limit."""

    def __call__(self, where: PlacementInput) -> Tensor:
        return where.token_positions.clamp_min(where.seq_len - where.context_length)
