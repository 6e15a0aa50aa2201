"""Contiguous blocks of equal size, scored by the sum of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Positive
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.ranking import Units
from kvkeep.types import Observation


@dataclass(frozen=True)
class Blocks(Checked):
    size: Positive = 16
    name: str = "block"
    usual: int = 16  # up to this size a shorter text is one block; larger sizes raise
    per_head = True

    def __call__(self, seen: Observation, scores: Tensor, free: Tensor) -> Units:
        if self.size > max(self.usual, seen.tokens):
            raise BadParameter(f"{self.name}={self.size} is larger than the text: {seen.tokens} tokens; use fewer.")
        unit = seen.once(("blocks", self.size), lambda: torch.arange(seen.tokens, device=scores.device) // self.size)
        unit = unit.expand_as(scores)
        return Units.summed(unit, scores * free, -(-seen.tokens // self.size))
