"""Part of the budget by votes, part drawn at random from the rest: NACL (arXiv:2408.03675).

Deviations: the voters are causal and themselves kept, as the paper's equation has it (its table 4 protects fewer than
vote). Drawing without replacement from softmax(votes) is done by adding Gumbel noise, seeded per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.compress.attention import from_end, received
from kvkeep.compress.guard import check_window, shrunk
from kvkeep.compress.select import best_first
from kvkeep.errors import BadParameter
from kvkeep.types import Observation

CERTAIN = 1e6  # above any vote plus noise: tokens chosen by rank come before tokens drawn


@dataclass(frozen=True)
class VotesAndLuck:
    window: int = 32
    random: float = 0.7  # share of the free budget that is drawn; the authors' code has 0.37
    seed: int = 0

    def __post_init__(self) -> None:
        check_window(self.window)
        if not 0 <= self.random <= 1:
            raise BadParameter(f"random={self.random} is not a share; use 0 (by votes alone) to 1 (all drawn).")

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = shrunk(self.window, budget)
        votes = received(seen, max(1, window))
        free = budget - window
        ranked = free - int(self.random * free + 1e-9)
        candidates = votes.masked_fill(from_end(seen) < window, float("-inf"))
        place = best_first(candidates).argsort(dim=1)
        return torch.where(place < ranked, votes + CERTAIN, votes + self._noise(seen))

    def _noise(self, seen: Observation) -> Tensor:
        """Standard Gumbel noise, the same on every device."""
        drawn = uniform(self.seed + 1_000_003 * seen.layer, seen.kv_heads * seen.tokens, seen.keys.device)
        return -(-drawn.log()).log().float().view(seen.kv_heads, -1)


def uniform(seed: int, count: int, device: torch.device) -> Tensor:
    """Numbers between 0 and 1, drawn by scrambling 0, 1, 2 …: integers are the same everywhere. [count] float64"""
    bits = torch.arange(count, device=device)
    for round_ in (seed, seed >> 32):
        bits = bits + (round_ & 0xFFFFFFFF) * 0x9E3779B9 & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            bits = (bits ^ (bits >> shift)) * factor & 0xFFFFFFFF
    return (bits.double() + 0.5) / 2**32
