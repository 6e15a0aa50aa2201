"""A dictionary of names that suggests the nearest known name for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn

from kvkeep.errors import UnknownName


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean …?' with the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


class Registry(dict):
    """Registered names of one kind: methods, modifiers, tasks."""

    def __init__(self, kind: str, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kind = kind

    def __missing__(self, name: str) -> NoReturn:
        raise UnknownName(f"no {self.kind} named '{name}'.{did_you_mean(name, self)} Known: {', '.join(self)}.")
