"""English words, from the package wonderwords. Its lists change between versions, and with them every sample."""

from __future__ import annotations

import bisect
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvkeep.errors import MissingExtra

OFFICIAL = "2.2.0"
INSTALL = f"pip install wonderwords=={OFFICIAL}, or kvkeep[eval]"


def installed() -> bool:
    return importlib.util.find_spec("wonderwords") is not None


def version() -> str:
    """The lists that were drawn from."""
    return f"wonderwords {importlib.metadata.version('wonderwords')}"


@cache
def words(kind: str) -> tuple[str, ...]:
    """kind: noun, adjective or verb. Read without importing the package, which warns on newer Pythons."""
    spec = importlib.util.find_spec("wonderwords")
    if spec is None or spec.origin is None:
        raise MissingExtra(f"RULER draws its words from wonderwords, which is missing: {INSTALL}")
    path = Path(spec.origin).parent / "assets" / f"{kind}list.txt"
    if not path.is_file():
        raise MissingExtra(f"{version()} has no {path.name}, from which RULER draws words: {INSTALL}")
    return tuple(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())


@cache
def pairs() -> Pairs:
    """Every adjective-noun."""
    return Pairs(words("adjective"), words("noun"))


class Pairs(Sequence):
    """sorted({f"{first}-{second}"}) without making its millions of strings.

    All pairs of one first word stand together, unless "first-" begins another first word ("well", "well-off"): the
    pairs of such words mingle, and are made.
    """

    def __init__(self, firsts: Sequence[str], seconds: Sequence[str]):
        self.seconds = sorted(set(seconds))
        self.groups: list[list[str]] = []
        for first in sorted({f"{first}-" for first in firsts}):
            if self.groups and first.startswith(self.groups[-1][0]):
                self.groups[-1].append(first)
            else:
                self.groups.append([first])
        self.mingled = {
            n: sorted({first + second for first in group for second in self.seconds})
            for n, group in enumerate(self.groups)
            if len(group) > 1
        }
        sizes = (len(self.mingled.get(n, self.seconds)) for n in range(len(self.groups)))
        self.starts = [0, *itertools.accumulate(sizes)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        n = bisect.bisect_right(self.starts, index) - 1
        within = index - self.starts[n]
        return self.mingled[n][within] if n in self.mingled else self.groups[n][0] + self.seconds[within]
