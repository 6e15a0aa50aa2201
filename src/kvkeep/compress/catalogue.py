"""The registered methods as values, `kvkeep.methods`, and the door for more: `kvkeep.register_method`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from kvkeep.arguments import check_value
from kvkeep.compress.method import Method, Preset
from kvkeep.compress.parse import parse
from kvkeep.compress.presets import METHODS
from kvkeep.errors import BadParameter
from kvkeep.registry import check_new

Build = TypeVar("Build", bound=Callable[..., Method])


class Catalogue(Mapping[str, Method]):
    """Every registered method with its default parameters; those that other packages add, too."""

    def __getitem__(self, name: str) -> Method:
        check_value("name", name, str)
        METHODS[name]  # raises for "snapkv+adakv", which is not one name
        return parse(name)

    def __contains__(self, name: object) -> bool:
        METHODS.load_plugins()
        return isinstance(name, str) and name in METHODS

    def __iter__(self) -> Iterator[str]:
        METHODS.load_plugins()
        return iter(METHODS)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def get(self, name: str, default: Any = None) -> Any:
        known = name in self  # an unknown name is no KeyError
        return self[name] if known else default

    def __repr__(self) -> str:
        return f"<methods: {', '.join(self)}>"


methods = Catalogue()


def register_method(name: str, *, paper: str = "", keeps: str = "", deviates: str = "") -> Callable[[Build], Build]:
    """Make a method known by name: a decorator for a function from parameters, all with defaults, to a Method.

    paper, keeps, deviates: shown by `kvkeep methods`. The function is called once, at once, to check the method.
    """
    check_new("method", name, METHODS)

    def register(build: Build) -> Build:
        check_value("build", build, Callable)
        preset = Preset(build, paper, keeps, deviates)
        _check_parameters(name, build)
        try:
            made = build()
        except BadParameter as error:
            raise BadParameter(f"'{name}': {error}") from error
        if not isinstance(made, Method):
            raise BadParameter(f"'{name}': the function should return a kvkeep.Method, not {made!r}.")
        METHODS[name] = preset
        return build

    return register


def _check_parameters(name: str, build: Callable) -> None:
    for parameter in inspect.signature(build).parameters.values():
        if parameter.default is parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY:
            raise BadParameter(f"'{name}': the parameter '{parameter}' needs a name and a default: {parameter.name}=4.")
