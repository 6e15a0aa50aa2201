"""Is a mathematical answer right? Ours ("math", "aime"), and three graders that others report with.

An answer is found in a solution and brought to one spelling (units, wrappers, blanks, fractions) before comparing.
"""

from __future__ import annotations

import re

from kvkeep.evaluate.metrics.equal import LONGEST, same
from kvkeep.evaluate.metrics.longbench import best_of_references

_UNITS = (
    "degrees? percent inch(?:es)? feet foot ft yards? miles? mph cm mm km m meters? metres? g kg grams? lbs? pounds? "
    "liters? litres? gallons? seconds? sec minutes? min hours? hrs? days? weeks? months? years? dollars? cents? "
    "square sq cubic cu units?"
)
_UNIT = "|".join(_UNITS.split())
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|displaystyle|mathbf|mathrm|bf|rm)(?![a-zA-Z])|(?<!\\)\\(?:!\s*|[,;: ()$%])|\$|%", ""),
        (r"\\([{}])", r"\1"),
        (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(le|ge|ne)q(?![a-zA-Z])", r"\\\1"),
        (r"\\begin\{array\}\{[^{}]*\}|\\begin\{bmatrix\}", r"\\begin{pmatrix}"),
        (r"\\end\{array\}|\\end\{bmatrix\}", r"\\end{pmatrix}"),
        (r"\^\{?\\circ\}?|°", ""),
        (r"(?<=\S)\s*\\(?:text|mbox)\{[^{}]*\}(?:\^\{?\d\}?)?$", ""),  # a unit: \text after a value
        (r"\\(?:text|mbox|textbf)\{([^{}]*)\}", r"\1"),
        (rf"(?<=[\d}}])\s+(?:(?:{_UNIT})\b\s*)+(?:\^\{{?\d\}}?)?$", ""),
        (r"\s+(?:and|or)\s+", ","),
        (r"^\s*\w{0,2}\s*(?:=|\\in(?![a-zA-Z])|\\to(?![a-zA-Z]))(?!.*=)|(?:^|(?<=,))\s*[xyz]\s*=", ""),
        (r"\\frac\s*(\w)", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*(\w)", r"\1{\2}"),
        (r"\\sqrt\s*(\d+|[a-z])", r"\\sqrt{\1}"),
        (r"_\{(\w+)\}", r"_\1"),
        (r"^0+(?=\d)", ""),
    )
]
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORDS = {word: number for number, word in enumerate(_SMALL.split())}
_WORDS |= {word: 10 * number for number, word in enumerate(_TENS.split(), start=2)}
_SCALES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000}


def normalise(answer: str) -> str:
    """The same answer without units, sizes, degree and percent signs, "x =" and spelled-out numbers."""
    text = answer.strip().lstrip(":").rstrip("./ ").replace("\n", " ")
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return number_word(text.strip())


def number_word(text: str) -> str:
    """'twenty-one' becomes '21'; anything but a number in words stays."""
    words = text.lower().replace("-", " ").split()
    if not words or any(word not in _WORDS and word not in _SCALES for word in words):
        return text
    total = part = 0
    for word in words:
        if word in _WORDS:
            part += _WORDS[word]
        elif word == "hundred":
            part = max(part, 1) * 100
        else:
            total, part = total + max(part, 1) * _SCALES[word], 0
    return str(total + part)


_INTEGER = re.compile(r"[+-]?\d{1,18}")


@best_of_references
def math_answer(prediction: str, reference: str | int, **_) -> float:
    r"""The last box (or "the answer is") against the reference, which may be a solution with a box of its own.

    Deviations from R-KV, on purpose: a factor of 100 or another bracket is wrong, integers are exact, sets and lists
    without brackets have no order, a box must close, and a number nobody calls the answer is none.
    """
    answer = _short(extract_answer(prediction)).replace("−", "-")
    expected = (last_box(str(reference)) or str(reference)).replace("−", "-")
    return float(same(normalise(answer), normalise(expected)))


@best_of_references
def aime_answer(prediction: str, reference: str | int, **_) -> float:
    """Compare as integers: 033 is 33."""
    answer = normalise(_short(extract_answer(prediction)))
    return float(bool(_INTEGER.fullmatch(answer)) and int(answer) == int(reference))


def math500_kvpress(prediction: str, reference: str, **_) -> float:
    """kvpress on MATH-500: from the first box to the next closing brace, whatever was opened between."""
    found, rest = prediction.partition("boxed{")[1:]
    return float(bool(found) and rest.partition("}")[0] == str(reference))


def aime25_kvpress(prediction: str, reference: str, **_) -> float:
    """kvpress on AIME: from the last box, or else from the start, to the next closing brace."""
    return float(prediction.rpartition("boxed{")[2].partition("}")[0] == str(reference))


def math_rkv_grader(prediction: str, reference: str, **_) -> float:
    """R-KV's rules, factor 100 included, and its verdict on every golden row.

    Deviation: the spelling rules are ours and shorter (units, number words, commas), and values are compared at random
    points instead of by sympy, so verdicts on other answers can differ from R-KV's.
    """
    return float(same(normalise(_short(rkv_answer(prediction))), normalise(str(reference)), loose=True))


def _short(answer: str | None) -> str:
    return answer if answer and len(answer) <= LONGEST else ""


_BRACES = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)
_PHRASE = re.compile(r"answer(?: is|:)[:*\s]*([^\n]+)", re.IGNORECASE)
_MINERVA = re.compile(r"final answer is \$(.*?)\$\. I hope", re.DOTALL)
_NUMBER = re.compile(r"-?\d*\.?\d+")


def last_box(text: str) -> str | None:
    r"""What the last \boxed{...} holds, braces matched; boxes that are empty or never closed do not count."""
    opened: list[tuple[bool, int]] = []
    start = end = -1
    for brace in _BRACES.finditer(text):
        if brace[0] == "}" and opened:
            is_box, begin = opened.pop()
            if is_box and begin > start and text[begin : brace.start()].strip():
                start, end = begin, brace.start()
        elif brace[0].endswith("{") and brace[0] != r"\{":
            opened.append((brace[0] != "{", brace.end()))
    return text[start:end] if end >= 0 else None


def extract_answer(text: str) -> str | None:
    """The last box, else what follows the last "answer is"; None where the text gives no answer."""
    box = last_box(text)
    if box is not None:
        return box
    said = _PHRASE.findall(text)
    return said[-1].strip(" *.") if said else None


def rkv_answer(text: str) -> str:
    """R-KV: the last box even if it never closes, else a phrase, else the last number."""
    if found := _MINERVA.search(text):
        return found[1]
    if "boxed" in text:
        return _rkv_box(text.rpartition("boxed")[2])
    for phrase in ("he answer is", "final answer is", "答案是"):
        if phrase in text:
            return text.rpartition(phrase)[2]
    numbers = _NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else ""


def _rkv_box(rest: str) -> str:
    if not rest.startswith("{"):
        return rest.partition("$")[0]
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:place]
    return rest[1:]
