"""Sharing a budget among layers, before or after seeing them all. The total is layers * budget, exactly.

`floor` is what every layer keeps in any case, `tokens` how many there are. An allocator that compares layers has
`weigh`, and compaction then waits for the last layer: until then all layers of the forward pass are held whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor as floor_of

import torch
from torch import Tensor

from kvkeep.compress.attention import attention, from_end, mean_and_variance
from kvkeep.compress.guard import check_window, shrunk
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.reference import entropy
from kvkeep.types import Observation


@dataclass(frozen=True)
class EqualLayers:
    weigh = None

    def __call__(self, budget: int, floor: int, tokens: int, layers: int) -> list[int]:
        return [budget] * layers


@dataclass(frozen=True)
class Pyramid:
    """PyramidKV (arXiv:2406.02069): shares beyond the floor fall linearly from the first layer to the last.

    Deviation: where the first layer would get more than there is, the line turns about its middle, so the total stays.
    """

    beta: int = 20
    weigh = None

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise BadParameter(f"beta={self.beta} must be 1 or more: the last layer gets 1/beta of the mean share.")

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
        shares = [high - slope * layer for layer in range(layers)] if layers > 1 else [Fraction(mean)]
        return [floor + share for share in whole(shares)]


class ByWeight:
    """Layers share what lies above the floor in proportion to a weight each of them shows."""

    window: int

    def weigh(self, seen: Observation, budget: int) -> Tensor:
        raise NotImplementedError

    def __call__(self, budget: int, floor: int, tokens: int, weights: list[float]) -> list[int]:
        if budget >= tokens:
            return [tokens] * len(weights)
        shares = poured(weights, len(weights) * (budget - floor), tokens - floor)
        return [floor + share for share in whole(shares)]

    def _rows(self, seen: Observation, budget: int) -> Tensor:
        """Attention of the window over the tokens before it. [heads, w, n], zero elsewhere"""
        window = shrunk(self.window, budget)
        rows = attention(seen, max(1, window))
        return (rows * (from_end(seen) >= window)[:, None, None]).flatten(0, 1)


@dataclass(frozen=True)
class CakeLayers(ByWeight):
    """CAKE (arXiv:2503.12491): entropy and temporal variance of the window's attention.

    Deviation: shared once, after the last layer, instead of cascading; the result is the same (its theorem 1).
    """

    tau1: float = 1.0
    tau2: float = 1.0
    window: int = 32

    def __post_init__(self) -> None:
        check_window(self.window)
        if self.tau1 <= 0 or self.tau2 <= 0:
            raise BadParameter(f"tau1={self.tau1}, tau2={self.tau2}: both must be positive.")

    def weigh(self, seen: Observation, budget: int) -> Tensor:
        rows = self._rows(seen, budget)
        disorder = entropy(rows).sum(1).mean()
        movement = mean_and_variance(rows)[1].sum(1).mean()
        return disorder ** (1 / self.tau1) * movement ** (1 / self.tau2)


@dataclass(frozen=True)
class EntropyLayers(ByWeight):
    """Layers whose window looks at many tokens get more: ActQKV's information density, taken from attention."""

    window: int = 32

    def __post_init__(self) -> None:
        check_window(self.window)

    def weigh(self, seen: Observation, budget: int) -> Tensor:
        rows = self._rows(seen, budget)
        total = rows.sum(-1, keepdim=True)
        return entropy(torch.where(total > 0, rows / total.clamp_min(1e-30), 0.0)).mean()


def poured(weights: list[float], amount: float, room: int) -> list[float]:
    """Share an amount in proportion to the weights; who is full passes the rest on, the weightless come last."""
    if any(not 0 <= w < float("inf") for w in weights):
        raise BadParameter(f"layer weights {weights} are not finite numbers; check the model's attention.")
    given, waiting = [0.0] * len(weights), set(range(len(weights)))
    while waiting and amount > 0 and room > 0:
        thirsty = [i for i in waiting if weights[i] > 0] or list(waiting)
        total = sum(weights[i] for i in thirsty) or len(thirsty)
        part = {i: amount * (weights[i] if weights[i] > 0 else 1.0) / total for i in thirsty}
        full = [i for i in thirsty if part[i] >= room]
        for i in full or thirsty:
            given[i] = min(part[i], room)
        amount = amount - room * len(full) if full else 0
        waiting -= set(full)
    return given


def whole(shares: list) -> list[int]:
    """Integers that follow the shares and add up to the same total: their running sum is rounded."""
    total, ends = 0, [0]
    for share in shares:
        total += share
        nudge = Fraction(1, 2) if isinstance(total, Fraction) else 0.5 + 1e-9
        ends.append(floor_of(total + nudge))
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]
