"""Find where in the window the question begins, and let only the question vote (IntentKV).

Deviations: the mean over the question's rows instead of the sum, so that each query head of a group votes equally;
where attention never jumps, the whole window is the question.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.compress.observe import attention, entropy
from kvkeep.errors import BadParameter
from kvkeep.types import Observation

STRETCH = 1024


@dataclass(frozen=True)
class Intent:
    window: int = 64
    smooth: int = 8
    intention: bool = True  # False: the whole window votes (the paper's ablation)

    def __post_init__(self) -> None:
        for name in ("window", "smooth"):
            if getattr(self, name) < 1:
                raise BadParameter(f"{name}={getattr(self, name)} must be 1 or more.")

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        rows = attention(seen, self.window)  # [kv_heads, group, w, n]
        if not self.intention:
            return rows.mean((1, 2))
        return torch.stack([self._question(head).mean(0) for head in rows])

    def _question(self, rows: Tensor) -> Tensor:
        """Mean attention of the question's rows, per query head. [group, w, n] -> [group, n]"""
        start = intention(rows, self.smooth)
        asks = torch.arange(rows.shape[1], device=rows.device) >= start[:, None]
        weights = asks / asks.sum(1, keepdim=True)
        return (weights[:, None, :] @ rows).squeeze(1)


def intention(rows: Tensor, smooth: int) -> Tensor:
    """The row before the biggest jump away from the window's first row. [heads, w, n] -> [heads]"""
    jumps = distance(rows, smoothing(rows, smooth)).diff(dim=1)
    if not jumps.shape[1]:
        return torch.zeros(len(rows), dtype=torch.long, device=rows.device)
    highest, where = jumps.max(1)
    return torch.where(highest > 0, where, 0)


def smoothing(rows: Tensor, smooth: int) -> Tensor:
    """Weights that sum each row and its smooth - 1 successors, and bring the sum back to 1. [heads, w, w]"""
    band = torch.ones(rows.shape[1], rows.shape[1], device=rows.device).triu().tril(smooth - 1)
    return band / (band @ rows.sum(-1, keepdim=True)).clamp_min(1e-30)


def distance(rows: Tensor, weights: Tensor) -> Tensor:
    """Square root of the Jensen–Shannon divergence (natural log) of every smoothed row from the first. [heads, w]

    JSD(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2, summed over stretches that fit a processor's cache.
    """
    disorder, between = rows.new_zeros(rows.shape[:2]), rows.new_zeros(rows.shape[:2])
    for part in rows.split(STRETCH, -1):
        smoothed = weights @ part
        disorder += entropy(smoothed)
        between += entropy((smoothed + smoothed[:, :1]).mul_(0.5))
    return (between - (disorder + disorder[:, :1]) / 2).clamp_min(0).sqrt()
