"""Dictionaries of names that suggest the nearest known name for an unknown one, and take more from other packages.

Other packages add methods and tasks by entry points: each names a module, and importing it registers them.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable
from importlib.metadata import entry_points
from threading import RLock
from typing import Any

from kvkeep.errors import BadParameter, UnknownName

_loaded: set[str] = set()
_lock = RLock()


def load_plugins(group: str) -> None:
    """Import what installed packages name in this group, once; what cannot be imported is left out, with a warning."""
    with _lock:
        if group in _loaded:
            return
        _loaded.add(group)
        for point in entry_points(group=group):
            try:
                point.load()
            except Exception as error:  # whatever other packages raise
                warnings.warn(
                    f"the plugin '{point.name}' ({point.value}, in {group}) could not be imported, so what it adds is "
                    f"missing: {type(error).__name__}: {error}",
                    stacklevel=2,
                )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean …?' with the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def check_new(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is taken, or that could not be written in "name:key=value+modifier,name"."""
    if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
        raise BadParameter(f"{name!r} cannot name a {kind}; use letters, digits, '_', '-' and '.' only.")
    if name in known:
        raise BadParameter(f"there is a {kind} named '{name}' already; use another name.")


class Registry(dict):
    """Registered names of one kind: methods, modifiers, tasks; plugins: the entry points that add to them."""

    def __init__(self, kind: str, *args, plugins: str = "", **kwargs):
        super().__init__(*args, **kwargs)
        self.kind, self.plugins = kind, plugins

    def load_plugins(self) -> None:
        if self.plugins:
            load_plugins(self.plugins)

    def __missing__(self, name: str) -> Any:
        self.load_plugins()
        if name in self:
            return self[name]
        raise UnknownName(f"no {self.kind} named '{name}'.{did_you_mean(name, self)} Known: {', '.join(self)}.")
