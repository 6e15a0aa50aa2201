"""RULER (arXiv:2404.06654): are the expected strings somewhere in the answer? In percent, for one answer or a task."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def string_match_all(prediction: str | Sequence[str], references: Sequence, **_) -> float:
    """The share of the references that are in the answer."""
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
