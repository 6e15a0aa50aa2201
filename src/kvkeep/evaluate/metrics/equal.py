r"""When two answers mean the same: as text, as numbers, part by part, and by value.

A LaTeX expression is read by hand, in floating point, so no text runs as code or for long: a sum is made of products, a
product of powers, a power of atoms, and the value is computed while reading. Letters are unknowns, and so is \pi:
3.14159 is not \pi.
"""

from __future__ import annotations

import cmath
import random
import re
from math import factorial, isclose

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
    """Split at the commas outside all brackets."""
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


LONGEST = 300  # characters; no answer of a mathematics benchmark comes near
TRIALS = 3
_GREEK = "alpha beta gamma delta epsilon theta lambda mu pi rho sigma tau phi varphi omega infty"
UNKNOWNS = {"\\" + name for name in _GREEK.split()}
FUNCTIONS = {
    r"\sin": cmath.sin,
    r"\cos": cmath.cos,
    r"\tan": cmath.tan,
    r"\cot": lambda x: 1 / cmath.tan(x),
    r"\ln": cmath.log,
    r"\log": cmath.log10,
    r"\exp": cmath.exp,
}
TIMES = {"*", r"\cdot", r"\times"}
OVER = {"/", r"\div"}
_TOKEN = re.compile(r"\\[a-zA-Z]+|\d+\.?\d*|\.\d+|[a-zA-Z]|[-+*/^!()\[\]{}|]")
_MIXED = re.compile(r"(?<![\d.}^\\])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_WORD = re.compile(r"(?<!\\)\b[a-zA-Z]{4,}")


def same_value(one: str, two: str) -> bool:
    """Whether two expressions agree at random points; a decimal number may be rounded to 1e-4."""
    symbolic = any(t.isalpha() or t in UNKNOWNS for t in _TOKEN.findall(one + " " + two))
    tolerance = 1e-4 if "." in one + two and not symbolic else 1e-9
    try:
        pairs = [(value_of(one, trial), value_of(two, trial)) for trial in range(TRIALS)]
    except (ArithmeticError, ValueError, RecursionError):
        return False
    return all(cmath.isfinite(a) and cmath.isclose(a, b, rel_tol=tolerance, abs_tol=1e-12) for a, b in pairs)


def value_of(text: str, trial: int = 0) -> complex:
    """The value with every unknown at its `trial`-th point; ValueError for what is not an expression."""
    text = _MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    if len(text) > LONGEST or _WORD.search(text) or _TOKEN.sub("", text).strip():
        raise ValueError(f"not an expression: {text[:80]!r}")
    reader = _Reader(_TOKEN.findall(text), trial)
    value = reader.sum()
    if reader.next:
        raise ValueError(f"cannot read {text!r} from {reader.next!r} on")
    return value


class _Reader:
    def __init__(self, tokens: list[str], trial: int):
        self.tokens = tokens[::-1]
        self.trial = trial

    @property
    def next(self) -> str:
        return self.tokens[-1] if self.tokens else ""

    def take(self, *wanted: str) -> str:
        if not self.tokens or (wanted and self.next not in wanted):
            raise ValueError(f"expected {' or '.join(wanted) or 'more'}, not {self.next!r}")
        return self.tokens.pop()

    def sum(self) -> complex:
        value = self.product()
        while self.next in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> complex:
        if self.next in ("+", "-"):
            return self.product() if self.take() == "+" else -self.product()
        value = self.power()
        while self.next and self.next not in ("+", "-", ")", "]", "}", "|"):
            if self.next in OVER:
                self.take()
                value /= self.signed()
            else:
                if self.next in TIMES:
                    self.take()
                value *= self.signed()
        return value

    def signed(self) -> complex:
        if self.next == "-":
            self.take()
            return -self.signed()
        return self.power()

    def power(self) -> complex:
        value = self.atom()
        while self.next == "!":
            self.take()
            value = _factorial(value)
        if self.next == "^":
            self.take()
            value **= self.signed()
        return value

    def atom(self) -> complex:
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return complex(float(token))
        if token in ("(", "{", "|"):
            value = self.sum()
            self.take({"(": ")", "{": "}", "|": "|"}[token])
            return complex(abs(value)) if token == "|" else value
        if token == r"\frac":
            above = self.atom()
            return above / self.atom()
        if token == r"\sqrt":
            return self.root()
        if token in FUNCTIONS:
            return self.function(FUNCTIONS[token])
        if token.isalpha() or token in UNKNOWNS:
            return _point(token, self.trial)
        raise ValueError(f"cannot read {token!r}")

    def root(self) -> complex:
        degree: complex = 2
        if self.next == "[":
            self.take()
            degree = self.sum()
            self.take("]")
        return self.atom() ** (1 / degree)

    def function(self, apply) -> complex:
        exponent: complex = 1
        if self.next == "^":
            self.take()
            exponent = self.atom()
        return apply(self.power()) ** exponent


def _factorial(value: complex) -> complex:
    if value.imag or not value.real.is_integer() or not 0 <= value.real <= 170:
        raise ValueError(f"no factorial of {value}")
    return complex(factorial(int(value.real)))


def _point(name: str, trial: int) -> complex:
    draw = random.Random(f"{name} {trial}")
    return complex(draw.uniform(-2, 2), draw.uniform(-2, 2))
