"""One HTML file of a template, its style and scripts, and the facts it shows: nothing is loaded from elsewhere.

Arrays are bits or bytes, compressed, in base64.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.errors import BadInput

TEMPLATES = files("kvkeep.pages") / "templates"


def page(name: str, facts: Any) -> str:
    """The page `name`, with a dataclass of facts.

    In the template, {{file}} stands for a file beside it, and {{facts}} for the facts as JSON.
    """
    values = {"facts": as_json(facts)}

    def fill(match: re.Match[str]) -> str:
        return values.get(match[1]) or (TEMPLATES / match[1]).read_text(encoding="utf-8")

    return re.sub(r"\{\{([\w.]+)\}\}", fill, (TEMPLATES / f"{name}.html").read_text(encoding="utf-8"))


def as_json(facts: Any) -> str:
    """JSON that a script element may hold: it has no <, so that no text can end the element."""
    text = json.dumps(asdict(facts), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def write_page(path: str | Path, name: str, facts: Any) -> int:
    """-> bytes written"""
    content = page(name, facts).encode("utf-8", "replace")
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise BadInput(f"{str(path)!r} cannot be written ({error.strerror}); give another path.") from None
    return len(content)


LEVELS = 255


@dataclass(frozen=True)
class Packed:
    """An array; the browser reads it with `unpack` of templates/base.js.

    kind: "bits", least first, every row (the last axis) from a byte of its own; "levels", bytes, each for
    low + byte / 255 * (high - low); "numbers", two bytes each, least first
    """

    kind: str
    shape: tuple[int, ...]
    data: str
    low: float = 0.0
    high: float = 1.0


def pack_bits(mask: Tensor) -> Packed:
    """[.., n] bool"""
    rows = np.packbits(mask.cpu().numpy(), axis=-1, bitorder="little")
    return Packed("bits", tuple(mask.shape), _encode(rows.tobytes()))


def pack_levels(values: Tensor, high: float | None = None) -> Packed:
    """Round to one of 256 levels. high: what is above is shown as this, so that few large values hide no others"""
    values = values.float().cpu()
    low = float(values.min())
    high = max(float(values.max()) if high is None else high, low + 1e-12)
    levels = ((values - low) / (high - low)).clamp(0, 1).mul(LEVELS).round().to(torch.uint8)
    return Packed("levels", tuple(values.shape), _encode(levels.numpy().tobytes()), low, high)


def pack_numbers(values: Tensor) -> Packed:
    """Whole numbers below 65,536."""
    return Packed("numbers", tuple(values.shape), _encode(values.cpu().numpy().astype("<u2").tobytes()))


def _encode(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 9)).decode()
