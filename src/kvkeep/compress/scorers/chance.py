"""Tokens drawn at random, per key head: the floor of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.compress.uniform import layer_seed, uniform
from kvkeep.types import Observation

POSITIONS = 2**24  # counters of a key head


@dataclass(frozen=True)
class RandomScorer:
    """A number of (seed, layer, key head, position): what is drawn does not depend on how the text is prefilled."""

    seed: int = 0

    def cache_key(self, budget: int) -> int:
        return 1

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        heads = torch.arange(seen.kv_heads, device=seen.keys.device)[:, None]
        counters = seen.token_positions.long() + POSITIONS * heads
        return uniform(layer_seed(self.seed, seen.layer), counters).float()
