"""The next token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvkeep.errors import BadParameter


def check_sampling(temperature: float, top_p: float) -> None:
    if not (temperature >= 0 and 0 < top_p <= 1):
        raise BadParameter(f"temperature={temperature}, top_p={top_p}: use 0 or more, and a share in (0, 1].")


@dataclass
class Sampler:
    """The likeliest token, or one drawn at a temperature from the likeliest that make up top_p."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    source: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p)
        self.source = torch.Generator().manual_seed(self.seed)

    def __call__(self, logits: Tensor) -> int:
        """logits [vocabulary]"""
        if not self.temperature:
            return int(logits.argmax())
        chances, tokens = (logits.float().cpu() / self.temperature).softmax(-1).sort(descending=True)
        chances[chances.cumsum(0) - chances >= self.top_p] = 0.0
        return int(tokens[torch.multinomial(chances, 1, generator=self.source)])
