"""What may be given for an argument: declared in its annotation, checked here.

`window: Annotated[int, Range(1)] = 64` takes whole numbers from 1 on, `pooling: Literal["avg", "max"] = "avg"` two
texts, and `gamma: float = 1.0`, without a range, any finite number.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from math import inf, isfinite
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from kvkeep.errors import BadParameter

LARGEST = 2**31 - 1  # of a number whose range has no other end
KINDS: dict[Any, tuple[Any, str]] = {  # what an annotation accepts, and what an error calls it
    int: (Integral, "a whole number"),
    float: (Real, "a finite number"),
    bool: (bool, "True or False"),
    str: (str, "a text"),
    os.PathLike: (os.PathLike, "a path"),
    Callable: (Callable, "a function"),
    NoneType: (NoneType, "None"),
}


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, more than `above` and less than `below`; odd: only those that are odd."""

    least: float = -inf
    most: float = LARGEST
    above: float = -inf
    below: float = inf
    odd: bool = False

    def __contains__(self, value: Any) -> bool:
        inside = self.least <= value <= self.most and self.above < value < self.below
        return inside and (value % 2 == 1 or not self.odd)

    def __str__(self) -> str:
        """Say the range, for example "1 or more", "0 to 1", or "more than 0, up to 1"."""
        low = f"more than {self.above}" if self.above > -inf else f"{self.least} or more"
        if self.below < inf:
            low += f", less than {self.below}"
        elif self.most < LARGEST:
            low = f"{low}, up to {self.most}" if self.above > -inf else f"{self.least} to {self.most}"
        return f"odd, {low}" if self.odd else low


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
Odd = Annotated[int, Range(1, odd=True)]
Seed = Annotated[int, Range(0, inf, below=2**63)]
Bytes = Annotated[int, Range(0, inf, below=2**63)]
Share = Annotated[float, Range(0, 1)]
Cosine = Annotated[float, Range(-1, 1)]
Amount = Annotated[float, Range(0)]
AboveZero = Annotated[float, Range(above=0)]


class Checked:
    """A dataclass whose fields are checked against their annotations when it is made."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, hint in hints(kind).items():
            if hasattr(self, name):
                check_value(name, getattr(self, name), hint)


def check_value(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that the annotation does not allow; kinds that are not in `KINDS` are not checked."""
    allowed = list(_alternatives(hint))
    if all(allowed) and not any(_fits(value, each) for each in allowed):
        what = ", or ".join(each[1] for each in allowed)
        large = ", below 2**31" if isinstance(value, int) and value > LARGEST else ""
        raise BadParameter(f"{name}={reprlib.repr(value)}: use {what}{large}.")


def check_finite(part: Any) -> None:
    """Refuse numbers that are not finite in the fields of a dataclass that declares no ranges."""
    for field in fields(part):
        value = getattr(part, field.name, None)
        if isinstance(value, float):
            check_value(field.name, value, float)


@cache
def hints(owner: Any) -> dict[str, Any]:
    """The annotations of a class or function; a plugin need not have any, and may import names for mypy alone."""
    try:
        return get_type_hints(owner, include_extras=True)
    except (NameError, TypeError):
        return {}


@cache
def _alternatives(hint: Any) -> tuple[Any, ...]:
    """List, for each alternative of an annotation, what a value must be, what to say, and its range or its values."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(found for each in get_args(hint) for found in _alternatives(each))
    if get_origin(hint) is Literal:
        return ((None, " or ".join(map(repr, get_args(hint))), get_args(hint)),)
    if get_origin(hint) is Annotated:
        kind, *rest = get_args(hint)
        declared = next((each for each in rest if isinstance(each, Range)), None)
        if declared is not None:
            what = f"a whole number, {declared}" if kind is int else str(declared)
            return ((KINDS[kind][0], what, declared),)
        return _alternatives(kind)
    return ((*KINDS[hint], None),) if hint in KINDS else (None,)


def _fits(value: Any, allowed: tuple[Any, str, Any]) -> bool:
    kind, _, within = allowed
    if kind is None:
        return any(type(value) is type(each) and value == each for each in within)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return False
    if kind not in (Integral, Real):
        return True
    return (isinstance(value, Integral) or isfinite(value)) and (within is None or value in within)
