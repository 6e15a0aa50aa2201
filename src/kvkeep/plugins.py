"""Other packages add methods and tasks by entry points: each names a module, and importing it registers them."""

from __future__ import annotations

import warnings
from importlib.metadata import entry_points
from threading import RLock

_loaded: set[str] = set()
_lock = RLock()


def load(group: str) -> None:
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
