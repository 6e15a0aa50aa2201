"""Is a mathematical answer right? Ours ("math", "aime"), and three graders that others report with."""

from __future__ import annotations

import re

from kvkeep.evaluate.metrics.answer import (
    extract_answer,
    first_box_to_brace,
    last_box,
    last_box_to_brace,
    rkv_answer,
)
from kvkeep.evaluate.metrics.equal import same
from kvkeep.evaluate.metrics.latex import normalise
from kvkeep.evaluate.metrics.value import LONGEST

_INTEGER = re.compile(r"[+-]?\d{1,18}")


def math_answer(prediction: str, reference: str | int, **_) -> float:
    r"""The last box (or "the answer is") against the reference, which may be a solution with a box of its own.

    Deviations from R-KV, on purpose: a factor of 100 or another bracket is wrong, integers are exact, sets and lists
    without brackets have no order, a box must close, and a number nobody calls the answer is none.
    """
    answer = _short(extract_answer(prediction)).replace("−", "-")
    expected = (last_box(str(reference)) or str(reference)).replace("−", "-")
    return float(same(normalise(answer), normalise(expected)))


def aime_answer(prediction: str, reference: str | int, **_) -> float:
    """Equal as integers: 033 is 33."""
    answer = normalise(_short(extract_answer(prediction)))
    return float(bool(_INTEGER.fullmatch(answer)) and int(answer) == int(reference))


def math500_kvpress(prediction: str, reference: str, **_) -> float:
    return float(first_box_to_brace(prediction) == str(reference))


def aime25_kvpress(prediction: str, reference: str, **_) -> float:
    return float(last_box_to_brace(prediction) == str(reference))


def math_rkv_grader(prediction: str, reference: str, **_) -> float:
    """R-KV's rules, factor 100 included, and its verdict on every golden row.

    Deviation: the spelling rules are ours and shorter (units, number words, commas), and values are compared at random
    points instead of by sympy, so verdicts on other answers can differ from R-KV's.
    """
    return float(same(normalise(_short(rkv_answer(prediction))), normalise(str(reference)), loose=True))


def _short(answer: str | None) -> str:
    return answer if answer and len(answer) <= LONGEST else ""
