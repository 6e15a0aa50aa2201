"""RULER's strings in an answer, needles in a haystack, and multiple choice by log-likelihood, as lm-eval scores it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from kvkeep.evaluate.metrics.rouge import rouge_1, rouge_l

_CONTROL = re.compile(r"[\x00-\x1f]")


def string_match_all(prediction: str | Sequence[str], references: Sequence, **_) -> float:
    """RULER (arXiv:2404.06654): the share of references that are in the answer; percent, of one answer or a task."""
    return _score(prediction, references, lambda found: sum(found) / len(found))


def string_match_part(prediction: str | Sequence[str], references: Sequence, **_) -> float:
    """Whether any reference is in the answer. (lm-eval's metric of this name is the share, and lower.)"""
    return _score(prediction, references, max)


def _score(prediction, references, judge: Callable[[list[bool]], float]) -> float:
    rows: Iterable = [(prediction, references)]
    if not isinstance(prediction, str):
        rows = zip(prediction, references, strict=True)
    scores = [judge([reference.lower() in clean(text).lower() for reference in wanted]) for text, wanted in rows]
    return round(sum(scores) / len(scores) * 100, 2)


def clean(prediction: str) -> str:
    """Control characters become line ends."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


EXPECTED = "eat a sandwich and sit in Dolores Park on a sunny day."


def heatmap(prediction: str, needle: str = "", expected_answer: str = EXPECTED, **_) -> float:
    """0..1, the share of the answer's distinct words that were said: what KVCache-Factory plots, and our default."""
    expected = set(expected_answer.lower().split())
    return len(expected & set(prediction.lower().split())) / len(expected)


def rouge1_of_ten(prediction: str, needle: str, **_) -> float:
    """0..10, rouge-1 against the whole needle: what KVCache-Factory stores."""
    return 10 * rouge_1(prediction, needle)


def kvpress_rouge(prediction: str, needle: str, **_) -> float:
    """0..1, kvpress: Rouge-L with the sides swapped. An empty answer raises, there and here."""
    return rouge_l(hypothesis=needle, reference=prediction)


def accuracy(loglikelihoods: Sequence[float], gold: int, **_) -> float:
    """Whether the likeliest choice, the first of equals, is the right one."""
    return float(loglikelihoods.index(max(loglikelihoods)) == gold)


def accuracy_per_character(loglikelihoods: Sequence[float], gold: int, choices: Sequence[str], **_) -> float:
    """lm-eval's acc_norm: the blank before the choice is not counted."""
    return accuracy(_shared_out(loglikelihoods, map(len, choices)), gold)


def accuracy_per_byte(loglikelihoods: Sequence[float], gold: int, choices: Sequence[str], **_) -> float:
    return accuracy(_shared_out(loglikelihoods, (len(choice.encode()) for choice in choices)), gold)


def _shared_out(loglikelihoods: Sequence[float], sizes: Iterable[int]) -> list[float]:
    return [value / size for value, size in zip(loglikelihoods, sizes, strict=True)]
