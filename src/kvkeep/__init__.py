"""kvkeep decides which key/value pairs of a long-context language model are worth keeping, and frees the rest."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.cache.cache import Cache as Cache
    from kvkeep.compress.api import select as select
    from kvkeep.compress.catalogue import methods as methods
    from kvkeep.compress.catalogue import register_method as register_method
    from kvkeep.compress.guard import Guard as Guard
    from kvkeep.compress.method import Method as Method
    from kvkeep.engine.context import Context as Context
    from kvkeep.engine.engine import Engine as Engine
    from kvkeep.evaluate.suite import register_task as register_task
    from kvkeep.model.load import load as load
    from kvkeep.types import Selection as Selection

__version__ = "0.2.0"
_HOME = {  # imported when first used, so that `import kvkeep` costs nothing
    "Cache": "kvkeep.cache.cache",
    "Context": "kvkeep.engine.context",
    "Engine": "kvkeep.engine.engine",
    "Guard": "kvkeep.compress.guard",
    "Method": "kvkeep.compress.method",
    "Selection": "kvkeep.types",
    "load": "kvkeep.model.load",
    "methods": "kvkeep.compress.catalogue",
    "register_method": "kvkeep.compress.catalogue",
    "register_task": "kvkeep.evaluate.suite",
    "select": "kvkeep.compress.api",
}
__all__ = sorted(_HOME)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker knows the names above, and no others

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module 'kvkeep' has no attribute '{name}'")
        globals()[name] = value = getattr(import_module(_HOME[name]), name)
        return value
