"""Answers brought to one spelling: units, wrappers, blanks and fractions as everyone writes them."""

from __future__ import annotations

import re

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
