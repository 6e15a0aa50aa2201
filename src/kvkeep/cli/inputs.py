"""Arguments of `kvkeep run`, checked before anything heavy is imported or loaded."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvkeep.compress.defaults import PROMPT_METHODS
from kvkeep.errors import BadInput


@dataclass(frozen=True)
class Plan:
    method: str | None  # None: the engine's own choice
    budget: int | float | str | None  # None: `full` has none
    parameters: dict[str, Any]
    storage: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of an `Engine`."""
        return {"storage": self.storage, **self.parameters}


def plans(
    method: str | None, budgets: str, settings: list[str] | None = None, storage: str | None = None
) -> list[Plan]:
    """One for each of the budgets, which commas part; `full` has no budget."""
    if method == "full":
        return [replace(_plan(method, budgets.split(",")[0].strip(), settings or [], storage), budget=None)]
    return [_plan(method, budget.strip(), settings or [], storage) for budget in dict.fromkeys(budgets.split(","))]


def _plan(method: str | None, budget: str, settings: list[str], storage: str | None) -> Plan:
    from kvkeep.compress.parse import parse_budget, setting

    parameters = dict(setting(each) for each in settings)
    _, number = setting(f"budget={budget}")
    if isinstance(number, bool | str) and number != "auto":
        raise BadInput(f"--budget {budget!r} is not a number; give tokens per KV head (512), a fraction (0.1) or auto.")
    parse_budget(method or PROMPT_METHODS[0], number, **parameters)[0].bits(storage)
    return Plan(method, number, parameters, storage)


def check_model(name: str) -> None:
    """Refuse a model that cannot be had, within seconds."""
    from kvkeep.model.load import check_name

    check_name(name)


def byte_count(name: str, text: str) -> int:
    """Read the number of bytes in 40GB, 512 MB, 1.5GiB, or a plain number; 0 is one, too."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kKMGT]?)(i?)B?", text.strip())
    if not found:
        raise BadInput(f"{name} {text!r} is not a size; give one such as 40GB or 512MB.")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


def prompt(document: str, question: str) -> tuple[str, str]:
    """The texts of document and question, neither empty."""
    if not question.strip():
        raise BadInput("the question is empty; say what you want to know about the document.")
    where = "standard input" if document == "-" else repr(document)
    text = _decode(_read(document), where).strip()
    if not text:
        raise BadInput(f"the document {where} is empty; give one with text in it.")
    return text, question.strip()


def _read(document: str) -> bytes:
    if document == "-":
        return sys.stdin.buffer.read()
    path = Path(document)
    try:
        if path.is_dir():
            raise BadInput(f"{document!r} is a folder; give one text file, or pipe several in and use - for them.")
        return path.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"there is no file {document!r}; check the path, or use - for standard input.") from None
    except OSError as error:
        raise BadInput(f"{document!r} cannot be read ({error.strerror}); check the path and its permissions.") from None


def _decode(content: bytes, where: str) -> str:
    at = content.find(b"\0")
    if at >= 0:
        raise BadInput(f"{where} is binary (a NUL at byte {at}); turn it into plain text first, e.g. with pdftotext.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{where} is not UTF-8 text (byte {error.start} is {content[error.start]:#04x}); "
            f"convert it first, e.g. with iconv -f latin1 -t utf-8."
        ) from None
