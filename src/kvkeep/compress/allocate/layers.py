"""Sharing a budget among layers: (budget, floor, tokens, layers) -> tokens per key head of each layer.

`floor` is what every layer keeps in any case, `tokens` how many there are. The total is layers * budget, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor as floor_of

from kvkeep.errors import BadParameter


@dataclass(frozen=True)
class EqualLayers:
    def __call__(self, budget: int, floor: int, tokens: int, layers: int) -> list[int]:
        return [budget] * layers


@dataclass(frozen=True)
class Pyramid:
    """PyramidKV (arXiv:2406.02069): shares beyond the floor fall linearly from the first layer to the last.

    Deviation: where the first layer would get more than there is, the line turns about its middle, so the total stays.
    """

    beta: int = 20

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


def whole(shares: list[Fraction]) -> list[int]:
    """Integers that follow the shares and add up to the same total: their running sum is rounded."""
    sums = [Fraction(0)]
    for share in shares:
        sums.append(sums[-1] + share)
    ends = [floor_of(s + Fraction(1, 2)) for s in sums]
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]
