"""Multiple choice by log-likelihood, as lm-eval scores it: the likeliest choice, the first of equals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def accuracy(loglikelihoods: Sequence[float], gold: int, **_) -> float:
    return float(loglikelihoods.index(max(loglikelihoods)) == gold)


def accuracy_per_character(loglikelihoods: Sequence[float], gold: int, choices: Sequence[str], **_) -> float:
    """lm-eval's acc_norm: the blank before the choice is not counted."""
    return accuracy(_shared_out(loglikelihoods, map(len, choices)), gold)


def accuracy_per_byte(loglikelihoods: Sequence[float], gold: int, choices: Sequence[str], **_) -> float:
    return accuracy(_shared_out(loglikelihoods, (len(choice.encode()) for choice in choices)), gold)


def _shared_out(loglikelihoods: Sequence[float], sizes: Iterable[int]) -> list[float]:
    return [value / size for value, size in zip(loglikelihoods, sizes, strict=True)]
