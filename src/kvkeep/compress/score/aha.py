"""Unbiased, sharpened, value-aware votes: AhaKV.

Every token is judged by the same number of recent rows; logits grow with the text so that long contexts do not flatten
the softmax; tokens with large values count more. While decoding, each step's row is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.compress.observe import real, received, value_sizes
from kvkeep.compress.pool import check_pool, pool
from kvkeep.compress.window import check_window, shrunk
from kvkeep.types import Observation, Step


@dataclass(frozen=True)
class Aha:
    """Scores by what `RecentVotes` noted: votes times values, smoothed over neighbours after a prompt."""

    pool: int = 5
    value_prior: bool = True
    looks = True

    def __post_init__(self) -> None:
        check_pool("pool", self.pool)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        tokens = real(seen)
        votes, size = seen.notes[..., 0], seen.notes[..., 1] * tokens
        if self.value_prior:
            largest = size.amax(1, keepdim=True)
            votes = votes * torch.where(largest > 0, size / largest.clamp_min(1e-30), 1.0)
        return votes if seen.is_step else pool(votes, tokens, self.pool)

    def step(self, now: Step, budget: int) -> Tensor:
        votes, size = now.notes.unbind(-1)
        return votes * size if self.value_prior else votes


@dataclass(frozen=True)
class RecentVotes:
    """Notes [kv_heads, n, 2]: votes of the recent rows, and the size of the token's value, fixed when first seen."""

    recent: int = 32
    value_pool: int = 5
    step_gain: bool = True
    width = 2
    sees_all = False  # the recent queries are enough

    def __post_init__(self) -> None:
        check_window(self.recent)
        check_pool("value_pool", self.value_pool)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        rows, tokens = 1 if seen.is_step else max(1, shrunk(self.recent, budget)), real(seen)
        votes = received(sharpened(seen, rows, budget) if self.step_gain else seen, rows)
        before, known = seen.notes.unbind(-1)
        size = pool(value_sizes(seen) * tokens, tokens, 1 if seen.is_step else self.value_pool)
        return torch.stack([before + votes if seen.is_step else votes, torch.where(known > 0, known, size)], -1)

    def step(self, now: Step, budget: int) -> Tensor:
        chances = now.chances
        if self.step_gain:
            factors = [gain(length, budget, now.value.shape[-1], now.scale) for length in now.lengths]
            factor = now.per_row(factors)
            chances = sharper(now, factor if isinstance(factor, float) else factor[..., None])
        notes = now.notes.clone()
        notes[..., 0] += chances.mean(2)
        notes[..., 1].scatter_(2, now.newest[..., None], now.value.float().square().sum(-1, keepdim=True))
        return notes


def sharper(now: Step, factor: Tensor | float) -> Tensor:
    """What the softmax would have made of queries so much larger: soft-capped as ever, beside the same sinks."""
    logits, cap = now.logits, now.softcap
    logits = logits * factor if cap is None else ((logits / cap).atanh() * factor).tanh() * cap
    if now.sinks is None:
        return logits.softmax(-1)
    return torch.cat([logits, now.sinks[..., None].float()], -1).softmax(-1)[..., :-1]


def gain(length: int, budget: int, dim: int, scale: float) -> float:
    """Step gain: once i > B tokens are seen, the scale is sqrt(2 ln(i/B)/dim) instead of the model's. As a factor."""
    return math.sqrt(2 * math.log(length / budget) / dim) / scale if length > budget else 1.0


def sharpened(seen: Observation, rows: int, budget: int) -> Observation:
    """The same observation with each of the last queries scaled by its step gain."""
    queries = seen.queries[:, -rows:].float()
    lengths = range(seen.cursor - queries.shape[1] + 1, seen.cursor + 1)
    factors = [gain(length, budget, queries.shape[-1], seen.scale) for length in lengths]
    return replace(seen, queries=queries * torch.tensor(factors, device=queries.device)[:, None])
