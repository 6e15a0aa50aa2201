"""Where in a model's solution its final answer stands."""

from __future__ import annotations

import re

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


def first_box_to_brace(text: str) -> str | None:
    """kvpress on MATH-500: from the first box to the next closing brace, whatever was opened between."""
    _, found, rest = text.partition("boxed{")
    return rest.partition("}")[0] if found else None


def last_box_to_brace(text: str) -> str:
    """kvpress on AIME: from the last box, or else from the start, to the next closing brace."""
    return text.rpartition("boxed{")[2].partition("}")[0]


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
