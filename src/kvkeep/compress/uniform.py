"""Random numbers that are the same on every device and in every order of computation: hashes of counters."""

from __future__ import annotations

from torch import Tensor


def uniform(seed: int, counters: Tensor) -> Tensor:
    """Numbers in (0, 1), one for each counter, by integer arithmetic alone. float64"""
    bits = counters.long()
    for round_ in (seed, seed >> 32):
        bits = bits + (round_ & 0xFFFFFFFF) * 0x9E3779B9 & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            bits = (bits ^ (bits >> shift)) * factor & 0xFFFFFFFF
    return (bits.double() + 0.5) / 2**32


def layer_seed(seed: int, layer: int) -> int:
    """Every layer draws its own numbers."""
    return seed + 1_000_003 * layer
