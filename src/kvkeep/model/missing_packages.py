"""Told from an error while a model was loaded: is a package missing, and which command brings it?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

PACKAGES = {"PIL": "pillow", "google": "protobuf", "yaml": "pyyaml"}  # where pip's name is not the module's
ASKED = re.compile(r"pip install (?:-U |--upgrade )?[`'\"]?([A-Za-z][\w.-]*\w)|requires the (\w[\w-]*) library")


def lacking(error: BaseException) -> str | None:
    """What to install, where an import failed somewhere behind an error; None: nothing is lacking."""
    behind = list(causes(error))
    for each in reversed(behind):  # the first to fail knows best
        if isinstance(each, ImportError) and each.name:
            return _command(each.name.partition(".")[0], each)
        if absent := _asked_for(each):
            return _command(absent, each)
    broken = next((each for each in behind if isinstance(each, ImportError)), None)
    return broken and f"a package could not be imported ({first_line(broken)}); install it again."


def _asked_for(error: BaseException) -> str | None:
    """The module of a package that an error's words ask for, if it is not there."""
    found = ASKED.search(str(error)) if isinstance(error, ImportError | ValueError) else None
    if found is None:
        return None
    package = (found[1] or found[2]).lower()
    module = {pip: module for module, pip in PACKAGES.items()}.get(package, package.replace("-", "_"))
    return module if find_spec(module) is None else None


def _command(module: str, error: BaseException) -> str:
    package = PACKAGES.get(module, module)
    if find_spec(module) is None:
        return f"the package {package} is missing: pip install {package}"
    return f"the package {package} does not work here ({first_line(error)}): pip install --force-reinstall {package}"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what was behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
