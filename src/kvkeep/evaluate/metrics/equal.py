"""When two answers mean the same: as text, as numbers, part by part, and by value."""

from __future__ import annotations

import re
from math import isclose

from kvkeep.evaluate.metrics.value import same_value

_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?")
_INTEGER = re.compile(r"[+-]?\d+")
_CHOICE = re.compile(r"\(?([A-E])(?:[).:].*)?")
_MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}")


def same(one: str, two: str, loose: bool = False) -> bool:
    """Whether two normalised answers mean the same; `loose` as R-KV: factor 100, any bracket, rounded integers."""
    if not one or not two:
        return False
    if _bare(one) == _bare(two) or _same_choice(one, two):
        return True
    if _is_number(one) and _is_number(two):
        return _same_number(one, two, loose)
    if one.count("=") == two.count("=") == 1:
        return _same_equation(one, two)
    kind, parts = _parts(one)
    other_kind, others = _parts(two)
    if len(parts) != len(others) or (kind != other_kind and not loose):
        return False
    if len(parts) == 1 and kind == other_kind == "":
        return same_value(one, two)
    return _same_parts(parts, others, loose, ordered=loose or kind not in ("", "{"))


def _bare(text: str) -> str:
    return text.replace(" ", "").lower()


def _same_choice(one: str, two: str) -> bool:
    """'(B)' and 'B. seven' are B."""
    said, wanted = _CHOICE.fullmatch(one), _CHOICE.fullmatch(two)
    return said is not None and wanted is not None and said[1] == wanted[1]


def _is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text)) and any(c.isdigit() for c in text)


def _same_number(one: str, two: str, loose: bool) -> bool:
    one, two = one.replace(",", ""), two.replace(",", "")
    if not loose and _INTEGER.fullmatch(one) and _INTEGER.fullmatch(two):
        return int(one) == int(two)
    factors = (1, 100, 0.01) if loose else (1,)
    return any(isclose(float(one), float(two) * factor, rel_tol=1e-4) for factor in factors)


def _same_equation(one: str, two: str) -> bool:
    left, right = ("{}-({})".format(*text.split("=")) for text in (one, two))
    return same_value(left, right) or same_value(f"-({left})", right)


def _parts(text: str) -> tuple[str, list[str]]:
    """The kind of a tuple, interval, set, list or matrix, and what is in it; '' and one part for a plain expression."""
    if found := _MATRIX.fullmatch(text):
        rows = found[1].split(r"\\")
        return f"matrix of {len(rows)} rows", [cell.strip() for row in rows for cell in row.split("&")]
    inner = _split(text)
    if len(inner) > 1 or text[0] not in "([{" or text[-1] not in ")]}":
        return "", inner
    inside = _split(text[1:-1])
    if len(inside) == 1:
        return "", inner
    return ("{" if text[0] == "{" else text[0] + text[-1]), inside


def _split(text: str) -> list[str]:
    """At the commas outside all brackets."""
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _same_parts(parts: list[str], others: list[str], loose: bool, ordered: bool) -> bool:
    if ordered:
        return all(same(one, two, loose) for one, two in zip(parts, others, strict=True))
    found = [[same(one, two, loose) for two in others] for one in parts]
    return all(map(any, found)) and all(map(any, zip(*found, strict=True)))
