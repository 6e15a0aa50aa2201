"""Unbiased, sharpened, value-aware votes: AhaKV.

Every token is judged by the same number of recent rows; logits grow with the text so that long contexts do not flatten
the softmax; tokens with large values count more. While decoding, each step's row is added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.compress.observe import attention, real
from kvkeep.compress.pool import check_pool, pool
from kvkeep.compress.window import check_window, shrunk
from kvkeep.kernels.reference import total
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
        votes, size = now.tokens.notes.unbind(-1)
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
        votes = total(attention(sharpened(seen, rows, budget) if self.step_gain else seen, rows))
        before, known = seen.notes.unbind(-1)
        size = pool(seen.values.float().square().sum(-1) * tokens, tokens, 1 if seen.is_step else self.value_pool)
        return torch.stack([before + votes if seen.is_step else votes, torch.where(known > 0, known, size)], -1)

    def step(self, now: Step, budget: int) -> Tensor:
        votes, size = now.tokens.notes.unbind(-1)
        chances = now.chances
        if self.step_gain:
            gain = gains(now.cursors, budget, now.tokens.keys.shape[-1], now.scale)
            chances = (now.logits * gain[:, None, None, None]).softmax(-1)
        at = now.newest[..., None]
        value = now.tokens.values.gather(2, at[..., None].expand(-1, -1, -1, now.tokens.values.shape[-1]))
        return torch.stack([votes + chances.mean(2), size.scatter(2, at, value.float().square().sum(-1))], -1)


def gains(lengths: Tensor, budget: int, dim: int, scale: float) -> Tensor:
    """Step gain: once i > B tokens are seen, the scale is sqrt(2 ln(i/B)/dim) instead of the model's. As a factor."""
    gain = (2 * (lengths.double() / budget).log().clamp_min(0) / dim).sqrt() / scale
    return torch.where(lengths > budget, gain, 1.0).float()


def sharpened(seen: Observation, rows: int, budget: int) -> Observation:
    """The same observation with each of the last queries scaled by its step gain."""
    queries = seen.queries[:, -rows:].float()
    lengths = torch.arange(seen.cursor - queries.shape[1] + 1, seen.cursor + 1, device=queries.device)
    return replace(seen, queries=queries * gains(lengths, budget, queries.shape[-1], seen.scale)[:, None])
