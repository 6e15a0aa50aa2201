"""Layer budgets: tokens per KV head of each layer; the total is layers * budget, exactly.

floor: tokens every layer keeps; tokens: length of the text. An allocator that compares layers has a `layer_weight`;
eviction then waits for the last layer: until then all layers of the forward pass are held uncompressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor as floor_of

import torch
from torch import Tensor

from kvkeep.arguments import AboveZero, Checked, Positive
from kvkeep.compress.attention import attention, distance_from_end, mean_and_variance
from kvkeep.compress.guard import effective_window
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.scoring import entropy
from kvkeep.types import Observation


@dataclass(frozen=True)
class EqualLayers:
    layer_weight, window = None, 0

    def __call__(self, budget: int, floor: int, tokens: int, layers: int) -> list[int]:
        return [budget] * layers


@dataclass(frozen=True)
class Pyramid(Checked):
    """PyramidKV (arXiv:2406.02069): budgets above the floor fall linearly from the first layer to the last.

    Deviation: where the first layer would get more tokens than there are, the slope is reduced, so the total stays.
    """

    beta: Positive = 20
    layer_weight, window = None, 0

    def __call__(self, budget: int, floor: int, tokens: int, layers: int) -> list[int]:
        if budget >= tokens:
            return [tokens] * layers
        mean = budget - floor
        low = mean // self.beta
        high = 2 * mean - low
        if high > tokens - floor:
            high = tokens - floor
            low = 2 * mean - high
        slope = Fraction(high - low, max(1, layers - 1))
        extra = [high - slope * layer for layer in range(layers)] if layers > 1 else [Fraction(mean)]
        return [floor + n for n in round_to_total(extra)]


class WeightedLayers(Checked):
    """Budgets above the floor in proportion to a weight computed from each layer."""

    window: int

    def layer_weight(self, seen: Observation, budget: int) -> Tensor:
        raise NotImplementedError

    def __call__(self, budget: int, floor: int, tokens: int, weights: list[float]) -> list[int]:
        if budget >= tokens:
            return [tokens] * len(weights)
        extra = distribute(weights, len(weights) * (budget - floor), tokens - floor)
        return [floor + n for n in round_to_total(extra)]

    def _rows(self, seen: Observation, budget: int) -> Tensor:
        """Attention of the window over the tokens before it. [heads, w, n], zero elsewhere"""
        window = effective_window(self.window, budget)
        rows = attention(seen, max(1, window))
        return (rows * (distance_from_end(seen) >= window)[:, None, None]).flatten(0, 1)


@dataclass(frozen=True)
class CakeLayers(WeightedLayers):
    """CAKE (arXiv:2503.12491): entropy and temporal variance of the window's attention.

    Deviation: allocated once, after the last layer, instead of cascading; the result is the same (its theorem 1).
    """

    tau1: AboveZero = 1.0
    tau2: AboveZero = 1.0
    window: Positive = 32

    def layer_weight(self, seen: Observation, budget: int) -> Tensor:
        rows = self._rows(seen, budget)
        dispersion = entropy(rows).sum(1).mean()
        shift = mean_and_variance(rows)[1].sum(1).mean()
        return dispersion ** (1 / self.tau1) * shift ** (1 / self.tau2)


@dataclass(frozen=True)
class EntropyLayers(WeightedLayers):
    """Layers whose window attends to many tokens get more: ActQKV's information density, taken from attention."""

    window: Positive = 32

    def layer_weight(self, seen: Observation, budget: int) -> Tensor:
        rows = self._rows(seen, budget)
        total = rows.sum(-1, keepdim=True)
        return entropy(torch.where(total > 0, rows / total.clamp_min(1e-30), 0.0)).mean()


def distribute(weights: list[float], amount: float, limit: int) -> list[float]:
    """Split an amount in proportion to the weights, at most `limit` each; zero weights get what others cannot take."""
    if any(not 0 <= w < float("inf") for w in weights):
        raise BadParameter(f"layer weights {weights} are not finite numbers; check the model's attention.")
    parts, remaining = [0.0] * len(weights), set(range(len(weights)))
    while remaining and amount > 0 and limit > 0:
        layers = [i for i in remaining if weights[i] > 0] or list(remaining)
        total = sum(weights[i] for i in layers) or len(layers)
        wanted = {i: amount * (weights[i] if weights[i] > 0 else 1.0) / total for i in layers}
        full = [i for i in layers if wanted[i] >= limit]
        for i in full or layers:
            parts[i] = min(wanted[i], limit)
        amount = amount - limit * len(full) if full else 0
        remaining -= set(full)
    return parts


def round_to_total(amounts: list) -> list[int]:
    """Integers close to the amounts with the same total: the running sum is rounded."""
    total, ends = 0, [0]
    for amount in amounts:
        total += amount
        nudge = Fraction(1, 2) if isinstance(total, Fraction) else 0.5 + 1e-9
        ends.append(floor_of(total + nudge))
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]
