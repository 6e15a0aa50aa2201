"""For mkdocs.yml: docstrings as they are written in src/, laid out for a page."""

import re
from textwrap import indent
from typing import Any

import griffe

FIELD = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*)(?=: )", re.M)  # "budget: tokens per KV head"


def as_markdown(text: str) -> str:
    """Parameters become items of a list, trees stay as they are drawn."""
    parts = [indent(part, "    ") if "── " in part else FIELD.sub(r"\n- **\1**", part) for part in text.split("\n\n")]
    return "\n\n".join(parts)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
