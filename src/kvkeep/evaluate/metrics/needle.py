"""Needle in a haystack: three ways to score the same answer."""

from __future__ import annotations

from kvkeep.evaluate.metrics.rouge import rouge_1, rouge_l

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
