"""Part of the budget by attention, part sampled from the rest: NACL (arXiv:2408.03675).

Deviations: the observation window is causal and kept, as in the paper's equation (its table 4 protects fewer tokens).
Sampling without replacement from softmax(scores) adds Gumbel noise, seeded per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Positive, Seed, Share
from kvkeep.compress.attention import attention_received, distance_from_end, layer_seed, uniform
from kvkeep.compress.guard import effective_window
from kvkeep.kernels.torch.ranking import best_first
from kvkeep.types import Observation

CERTAIN = 1e6  # above any score plus noise: tokens selected by rank come before sampled ones


@dataclass(frozen=True)
class NaclScorer(Checked):
    window: Positive = 32
    random: Share = 0.7  # fraction of the free budget that is sampled; the authors' code has 0.37
    seed: Seed = 0
    additive = False  # some are noise, some are certain

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = effective_window(self.window, budget)
        scores = attention_received(seen, max(1, window))
        free = budget - window
        ranked = free - int(self.random * free + 1e-9)
        candidates = scores.masked_fill(distance_from_end(seen) < window, float("-inf"))
        rank = best_first(candidates).argsort(dim=1)
        return torch.where(rank < ranked, scores + CERTAIN, scores + self._noise(seen))

    def _noise(self, seen: Observation) -> Tensor:
        """Standard Gumbel noise, the same on every device."""
        counters = torch.arange(seen.kv_heads * seen.tokens, device=seen.keys.device)
        drawn = uniform(layer_seed(self.seed, seen.layer), counters)
        return -(-drawn.log()).log().float().view(seen.kv_heads, -1)
