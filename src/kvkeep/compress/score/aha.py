"""Unbiased, sharpened, value-aware votes: AhaKV.

Every token is judged by the same number of recent rows; logits grow with the text so that long contexts do not flatten
the softmax; tokens with large values count more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.compress.observe import attention, real
from kvkeep.compress.pool import check_pool, pool
from kvkeep.compress.window import check_window, shrunk
from kvkeep.types import Observation


@dataclass(frozen=True)
class Aha:
    recent: int = 32
    pool: int = 5
    value_pool: int = 5
    step_gain: bool = True
    value_prior: bool = True

    def __post_init__(self) -> None:
        check_window(self.recent, self.pool)
        check_pool("value_pool", self.value_pool)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        rows = max(1, shrunk(self.recent, budget))
        votes = attention(sharpened(seen, rows, budget) if self.step_gain else seen, rows).sum(2).mean(1)
        if self.value_prior:
            votes = votes * prior(seen, self.value_pool)
        return pool(votes, real(seen), self.pool)


def sharpened(seen: Observation, rows: int, budget: int) -> Observation:
    """Step-gain softmax: once i > B tokens are seen, a row's scale is sqrt(2 ln(i/B)/dim) instead of the model's."""
    queries = seen.queries[:, -rows:].float()
    length = torch.arange(seen.cursor - queries.shape[1] + 1, seen.cursor + 1, device=queries.device).double()
    gain = (2 * (length / budget).log().clamp_min(0) / queries.shape[-1]).sqrt() / seen.scale
    return replace(seen, queries=queries * torch.where(length > budget, gain, 1.0).float()[:, None])


def prior(seen: Observation, width: int) -> Tensor:
    """Squared norm of the values, smoothed, relative to the largest; one where all values are nought. [kv_heads, n]"""
    tokens = real(seen)
    size = pool(seen.values.float().square().sum(-1) * tokens, tokens, width)
    largest = size.amax(1, keepdim=True)
    return torch.where(largest > 0, size / largest.clamp_min(1e-30), 1.0)
