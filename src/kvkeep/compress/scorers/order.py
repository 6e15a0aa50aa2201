"""Orders of tokens that say nothing of what they mean: the most recent ones; and chance, the floor of comparisons."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Seed
from kvkeep.compress.attention import PromptScores, any_budget, distance_from_end, layer_seed, uniform
from kvkeep.types import Observation, Step

POSITIONS = 2**24  # counters of a KV head


@dataclass(frozen=True)
class RecencyScorer:
    """The most recent tokens come first. An order, not a score: head budgets cannot compare heads with it."""

    has_scores = False
    needs_attention = False
    per_head = True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return -distance_from_end(seen).float()

    def step(self, now: Step, budget: int) -> Tensor:
        return now.token_positions


@dataclass(frozen=True)
class RandomScorer(Checked):
    """A number of (seed, layer, KV head, position): what is drawn does not depend on how the text is prefilled."""

    seed: Seed = 0
    additive = False
    cache_key = any_budget

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        heads = torch.arange(seen.kv_heads, device=seen.keys.device)[:, None]
        counters = seen.token_positions.long() + POSITIONS * heads
        return uniform(layer_seed(self.seed, seen.layer), counters).float()


@dataclass(frozen=True)
class RandomAnswerScorer(Checked):
    """The same number, above 1 for tokens that `PromptMark` marks: generated ones are drawn from first."""

    seed: Seed = 0
    additive = False

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return seen.token_state[..., 0] + RandomScorer(self.seed)(seen, budget)


@dataclass(frozen=True)
class PromptMark(PromptScores):
    """token_state [kv_heads, n, 1]: 1 for a prompt's tokens, 0 for generated ones."""

    def scores(self, seen: Observation) -> Tensor:
        return torch.ones_like(seen.newest, dtype=torch.float32)
