"""Unbiased, sharpened, value-aware votes: AhaKV.

Every token is judged by the same number of recent rows; logits grow with the text so that long contexts do not flatten
the softmax; tokens with large values count more. While decoding, each step's row is added as it is (the paper's
Algorithm 1, lines 19 and 27); with `decode_prior` the values weigh those rows too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.compress.attention import real, received, value_sizes
from kvkeep.compress.guard import check_window, shrunk
from kvkeep.compress.pooling import check_pool, pool
from kvkeep.errors import BadParameter
from kvkeep.kernels.dispatch import column_mass
from kvkeep.types import Observation, Step

GAINS = ("replace", "multiply")


@dataclass(frozen=True)
class Aha:
    """Scores by what `RecentVotes` noted, smoothed over neighbours after a prompt."""

    pool: int = 5
    value_prior: bool = False  # True: what was noted lacks the values' weight, and gets it whenever tokens compete
    looks = True

    def __post_init__(self) -> None:
        check_pool("pool", self.pool)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        tokens = real(seen)
        votes, size = seen.notes.unbind(-1)
        if self.value_prior:
            votes = votes * prior(size * tokens)
        return votes if seen.is_step else pool(votes, tokens, self.pool)

    def step(self, now: Step, budget: int) -> Tensor:
        votes, size = now.notes.unbind(-1)
        return votes * size if self.value_prior else votes


@dataclass(frozen=True)
class RecentVotes:
    """Notes [kv_heads, n, 2]: a token's votes, and the size of its value, fixed when first seen.

    Votes of a prompt are those of its recent rows, weighted by the values where value_prior says so; a step's row comes
    on top unweighted.
    """

    recent: int = 32
    value_pool: int = 5
    step_gain: bool = True
    value_prior: bool = True
    gain: str = "replace"  # step gain instead of the model's scale, or "multiply": on top of it
    recent_only: bool = True  # False: all rows of a prompt vote (the paper's ablation of recent accumulation)
    width = 2

    def __post_init__(self) -> None:
        check_window(self.recent)
        check_pool("value_pool", self.value_pool)
        if self.gain not in GAINS:
            raise BadParameter(f"gain={self.gain!r} is not known; use {' or '.join(map(repr, GAINS))}.")

    @property
    def sees_all(self) -> bool:
        """Whether every query of a prompt adds to the sum; else the recent ones are enough."""
        return not self.recent_only

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        before, known = seen.notes.unbind(-1)
        tokens = real(seen)
        size = pool(value_sizes(seen) * tokens, tokens, 1 if seen.is_step else self.value_pool)
        size = torch.where(known > 0, known, size)
        votes = self._votes(seen, budget)
        if self.value_prior and not seen.is_step:
            votes = votes * prior(size * tokens)
        return torch.stack([before + votes if seen.is_step or self.sees_all else votes, size], -1)

    def _votes(self, seen: Observation, budget: int) -> Tensor:
        """What the rows that count give each token. [kv_heads, n]"""
        rows = 1 if seen.is_step else seen.queries.shape[1] if self.sees_all else max(1, shrunk(self.recent, budget))
        sharp = sharpened(seen, rows, budget, self.gain) if self.step_gain else seen
        if not self.sees_all:
            return received(sharp, rows)
        how = seen.scale, seen.softcap, seen.sinks
        return column_mass(sharp.queries, seen.keys, seen.positions, seen.cursor, *how)

    def step(self, now: Step, budget: int) -> Tensor:
        chances = now.chances
        if self.step_gain:
            how = budget, now.value.shape[-1], now.scale, self.gain
            factor = now.per_row([gain(length, *how) for length in now.lengths])
            chances = sharper(now, factor if isinstance(factor, float) else factor[..., None])
        notes = now.notes.clone()
        notes[..., 0] += chances.mean(2)
        notes[..., 1].scatter_(2, now.newest[..., None], now.value.float().square().sum(-1, keepdim=True))
        return notes


def prior(size: Tensor) -> Tensor:
    """The size of each value as a share of the largest; all ones where every value is nothing. [kv_heads, n]"""
    largest = size.amax(1, keepdim=True)
    return torch.where(largest > 0, size / largest.clamp_min(1e-30), 1.0)


def sharper(now: Step, factor: Tensor | float) -> Tensor:
    """What the softmax would have made of queries so much larger: soft-capped as ever, beside the same sinks."""
    logits, cap = now.logits, now.softcap
    logits = logits * factor if cap is None else ((logits / cap).atanh() * factor).tanh() * cap
    if now.sinks is None:
        return logits.softmax(-1)
    return torch.cat([logits, now.sinks[..., None].float()], -1).softmax(-1)[..., :-1]


def gain(length: int, budget: int, dim: int, scale: float, how: str = "replace") -> float:
    """Step gain as a factor of the model's logits: 1 until more than the budget is seen, i > B.

    "replace": the scale is sqrt(2 ln(i/B)/dim) instead of the model's; "multiply": both (λ·QKᵀ/√d).
    """
    if length <= budget:
        return 1.0
    return math.sqrt(2 * math.log(length / budget) / dim) / (scale if how == "replace" else 1.0)


def sharpened(seen: Observation, rows: int, budget: int, how: str = "replace") -> Observation:
    """The same observation with each of the last queries scaled by its step gain."""
    queries = seen.queries[:, -rows:].float()
    lengths = range(seen.cursor - queries.shape[1] + 1, seen.cursor + 1)
    factors = [gain(length, budget, queries.shape[-1], seen.scale, how) for length in lengths]
    return replace(seen, queries=queries * torch.tensor(factors, device=queries.device)[:, None])
