"""Which package is missing, from an error while a model was loaded, and the command that installs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

PACKAGES = {"PIL": "pillow", "google": "protobuf", "yaml": "pyyaml"}  # where pip's name is not the module's
REQUIRED = re.compile(r"pip install (?:-U |--upgrade )?[`'\"]?([A-Za-z][\w.-]*\w)|requires the (\w[\w-]*) library")


def missing_package(error: BaseException) -> str | None:
    """What to install, if a failed import caused the error; else None."""
    chain = list(causes(error))
    for each in reversed(chain):  # the first error is the most specific
        if isinstance(each, ImportError) and each.name:
            return _command(each.name.partition(".")[0], each)
        if module := _required(each):
            return _command(module, each)
    broken = next((each for each in chain if isinstance(each, ImportError)), None)
    return None if broken is None else f"a package could not be imported ({first_line(broken)}); install it again."


def _required(error: BaseException) -> str | None:
    """The module of a package that an error's text names, if it is not installed."""
    found = REQUIRED.search(str(error)) if isinstance(error, ImportError | ValueError) else None
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
    """An error and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
