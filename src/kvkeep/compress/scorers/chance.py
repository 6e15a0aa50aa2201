"""Tokens drawn at random, per KV head: the floor of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Seed
from kvkeep.compress.attention import layer_seed, uniform
from kvkeep.types import Observation

POSITIONS = 2**24  # counters of a KV head


@dataclass(frozen=True)
class RandomScorer(Checked):
    """A number of (seed, layer, KV head, position): what is drawn does not depend on how the text is prefilled."""

    seed: Seed = 0
    additive = False

    def cache_key(self, budget: int) -> int | None:
        return 1

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        heads = torch.arange(seen.kv_heads, device=seen.keys.device)[:, None]
        counters = seen.token_positions.long() + POSITIONS * heads
        return uniform(layer_seed(self.seed, seen.layer), counters).float()


@dataclass(frozen=True)
class PromptMark:
    """token_state [kv_heads, n, 1]: 1 for a prompt's tokens, 0 for generated ones."""

    width, sees_all, prompt_only = 1, True, True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return seen.token_state if seen.is_step else seen.token_state.scatter(1, seen.newest[..., None], 1.0)


@dataclass(frozen=True)
class RandomAnswerScorer(RandomScorer):
    """The same number, above 1 for tokens that `PromptMark` marks: generated ones are drawn from first."""

    def cache_key(self, budget: int) -> None:
        return None

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return seen.token_state[..., 0] + super().__call__(seen, budget)
