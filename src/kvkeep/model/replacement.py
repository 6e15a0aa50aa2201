"""A function in the place of another one, and whether the two compute the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import RLock
from typing import Any

import torch
from torch import Tensor

SAME = 8  # roundings by which the same operation may differ
LOCK = RLock()

Forward = Callable[..., Any]


class Replacement:
    """A function in the place of another one for as long as anybody is inside."""

    def __init__(self, names: dict[str, Any], name: str, function: Forward) -> None:
        """names: of a module's attributes or of a file's functions"""
        self.names, self.name, self.function = names, name, function
        self.users, self.before = 0, None

    def __enter__(self) -> None:
        with LOCK:
            if not self.users:
                self.before = self.names.get(self.name)
                self.names[self.name] = self.function
            self.users += 1

    def __exit__(self, *_: Any) -> None:
        with LOCK:
            self.users -= 1
            if self.users:
                return
            if self.before is None:
                del self.names[self.name]
            else:
                self.names[self.name] = self.before


def random(*shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape, device=like.device).to(like.dtype)


def output_of(function: Forward, *args: Tensor) -> Any:
    """None where it takes other arguments."""
    with suppress(TypeError, RuntimeError, AttributeError):
        return function(*args)


def same(ours: Tensor, theirs: Any) -> bool:
    return difference(ours, theirs) <= SAME


def difference(ours: Tensor, theirs: Any) -> float:
    """In roundings of the largest number."""
    if not isinstance(theirs, Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    off = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-6)
    return float(off) / torch.finfo(ours.dtype).eps
