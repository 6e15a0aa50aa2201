"""InfiniteBench (arXiv:2402.13718), by the official rules, odd as some are.

A label is a value, or a list with it. Only kv_retrieval never finds one in a list, officially: unwrap it before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from kvkeep.errors import BadInput
from kvkeep.evaluate.metrics.rouge import rouge_l_sum
from kvkeep.evaluate.metrics.words import as_list, chinese_text, english_words, f1, replaced
from kvkeep.registry import Registry

_SIGNS = ("\n", ":", '"', "'", ".", ",", "?", "!", "{", "}")


def first(label: Any) -> Any:
    return label[0] if isinstance(label, list) else label


def kv_retrieval(prediction: str, label: str, **_) -> float:
    return float(label in replaced(prediction, *_SIGNS).split())


def first_integer(prediction: str, label: str | list[str], **_) -> float:
    """passkey, number_string: the first run of digits."""
    found = re.search("[0-9]+", prediction)
    return float((found[0] if found else "") == first(label))


def code_run(prediction: str, label: int | list[int], **_) -> float:
    """The last word, as an integer."""
    words = replaced(prediction, "\n", ".", "`", "'", '"', ":").split()
    try:
        return float(int(words[-1]) == first(label))
    except (IndexError, ValueError):
        return 0.0


def math_find(prediction: str, label: float | list[float], **_) -> float:
    """The first number. BadInput where the official code raises: a decimal for an integer, a label not a number."""
    expected = first(label)
    if not isinstance(expected, int | float):
        raise BadInput(f"math_find compares with a number, not with {expected!r}: convert the label first.")
    found = re.search(r"\d+\.\d+|\d+", prediction)
    if not found:
        return 0.0
    if isinstance(expected, int) and "." in found[0]:
        raise BadInput(
            f"math_find reads {found[0]} where the label is the integer {expected}: it has no rule for that."
        )
    if isinstance(expected, int):
        return float(_digits(found[0]) == str(expected))
    return float(float(found[0]) == expected)


def math_calc(prediction: str, label: list, **_) -> float:
    """How much of the expected sequence the answer gets right before its first mistake."""
    expected = first(label) if isinstance(label[0], list) else label
    right = 0
    for number, wanted in zip(re.findall("[0-9]+", prediction), expected, strict=False):
        if _digits(number) != str(wanted):
            break
        right += 1
    return right / len(expected)


def _digits(number: str) -> str:
    """Write the number as an integer; int() refuses more than 4,300 digits."""
    return number.lstrip("0") or "0"


def code_debug(prediction: str, label: list[str], **_) -> float:
    """'B.' or 'B:' at the start, or the letter or the function's name after a phrase; a bare 'B' is wrong."""
    name, letter = label[:2]
    text = prediction.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = _squeezed(replaced(text, "\n", "`", "'", '"', "-", "*", "Option", "option"))
    said = _after_phrase(text, "answer is:", "is:", "answer:", "correct option is:")
    return float(said is not None and said.startswith((letter, name)))


def longbook_choice(prediction: str, label: list[str], **_) -> float:
    """A first letter from A to D decides ("Answer: B" is A), then the whole text, then a phrase, then a word."""
    text = prediction.strip()
    if text[:1] in tuple("ABCD"):
        return float(text[0] in label)
    if text in label:
        return 1.0
    text = _squeezed(replaced(text, "\n", '"', "'", ".", ",", "?", "!", "{", "}"))
    said = _after_phrase(text, "answer is:", "answer:", "answer is", "option is")
    if said is not None:
        return float(said.startswith(tuple(label)))
    letters = [word for word in text.split() if word in "ABCD"]
    return float(bool(letters) and letters[0] in label)


def _squeezed(text: str) -> str:
    return re.sub(" {2,}", " ", text)


def _after_phrase(text: str, *phrases: str) -> str | None:
    """What follows the first phrase that occurs, less one character; None where none does."""
    for phrase in phrases:
        if phrase in text:
            return text.partition(phrase)[2][1:]
    return None


def longdialogue_qa(prediction: str, label: list[str], **_) -> float:
    """The first label must be one of the words, in capitals."""
    return float(label[0] in replaced(prediction, *_SIGNS).upper().split())


def longbook_qa(prediction: str, label: str | list[str], **_) -> float:
    return max(f1(english_words(prediction), english_words(text)) for text in as_list(label))


def longbook_qa_chinese(prediction: str, label: str | list[str], **_) -> float:
    """F1 over single characters."""
    return max(f1(chinese_text(prediction), chinese_text(text)) for text in as_list(label))


def longbook_sum(prediction: str, label: str | list[str], **_) -> float:
    return max(rouge_l_sum(prediction, text) for text in as_list(label))


TASKS = Registry(
    "InfiniteBench task",
    passkey=first_integer,
    number_string=first_integer,
    kv_retrieval=kv_retrieval,
    longbook_sum_eng=longbook_sum,
    longbook_choice_eng=longbook_choice,
    longbook_qa_eng=longbook_qa,
    longbook_qa_chn=longbook_qa_chinese,
    longdialogue_qa_eng=longdialogue_qa,
    math_find=math_find,
    math_calc=math_calc,
    code_run=code_run,
    code_debug=code_debug,
)


def score_answer(prediction: str, references: Sequence[str], dataset: str, **_) -> float:
    """One answer to one task, 0..1. References are texts: numbers are read, one label is unwrapped.

    What the official math_find raises on, a decimal where an integer is right, is wrong here.
    """
    label: Any = list(references)
    if dataset in ("math_find", "math_calc", "code_run"):
        label = json.loads(label[0])
    elif dataset == "kv_retrieval":
        label = label[0]
    try:
        return TASKS[dataset](prediction, label)
    except BadInput:
        return 0.0
