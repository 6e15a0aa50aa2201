"""kvkeep decides which key/value pairs of a long-context language model are worth keeping, and frees the rest."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_HOME = {  # imported when first used, so that `import kvkeep` costs nothing
    "Cache": "kvkeep.cache.cache",
    "Context": "kvkeep.engine.context",
    "Engine": "kvkeep.engine.engine",
    "Method": "kvkeep.compress.method",
    "select": "kvkeep.compress.api",
}
__all__ = ["Cache", "Context", "Engine", "Method", "methods", "select"]


def __getattr__(name: str) -> Any:
    if name == "methods":
        value = import_module("kvkeep.compress.parse").catalogue()
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'kvkeep' has no attribute '{name}'")
    globals()[name] = value
    return value
