"""How alike two lines of code are, in whole percents, as fuzzywuzzy 0.18 says it over either of its back ends."""

from __future__ import annotations

from collections.abc import Callable
from difflib import SequenceMatcher

from kvkeep.evaluate.metrics.lcs import lengths


def first_line_of_code(text: str) -> str:
    """The first line without a backtick, '#' or '//'; blank lines count, leading line ends do not."""
    for line in text.lstrip("\n").split("\n"):
        if not any(sign in line for sign in ("`", "#", "//")):
            return line
    return ""


def difflib_ratio(one: str, two: str) -> float:
    return SequenceMatcher(None, one, two).ratio()


def levenshtein_ratio(one: str, two: str) -> float:
    """Of all characters, those in a longest common subsequence: python-Levenshtein, thefuzz, rapidfuzz."""
    return 2 * lengths(one, two)[-1][-1] / (len(one) + len(two))


def likeness(one: str, two: str, ratio: Callable[[str, str], float] = difflib_ratio) -> float:
    if one == two:
        return 1.0
    if not one or not two:
        return 0.0
    return round(100 * ratio(one, two)) / 100
