"""A retrieval method is a value too: how tokens are put away, what is known of them, and who asks for them.

tokens that leave the near window -> cut into units -> described -> put away
a window of queries -> probe -> match with the descriptions -> select units -> fetch -> attend
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from kvkeep.errors import BadParameter, BudgetTooSmall


@dataclass(frozen=True)
class Sizes:
    """Tokens per key head."""

    sinks: int
    near: int
    unit: int  # the most a fetched unit usually takes

    @property
    def least(self) -> int:
        return self.sinks + self.near + self.unit


@dataclass(frozen=True)
class Recall:
    cut: Callable  # tokens that leave -> which unit each belongs to
    index: Callable  # describes units, and says what they are worth to queries
    window: int | None = 256  # queries that look together; None: a prompt is read whole, at true positions
    far: Literal["edge", "side by side", "true"] = "edge"  # where fetched tokens stand, seen from a query
    sinks: int | None = None
    near: int | None = None
    usual: tuple[int, int] = (64, 512)  # sinks and near tokens where nobody says: a 16th, a quarter of it at most
    density: bool | Literal["reverse"] = False  # while decoding, layers share what they fetch by the entropy of matches
    neighbours: float = 0.0  # this share of what is fetched are units beside the best
    similar: float | None = None  # while decoding, fetch again only when the query is less like the last one that did
    once: bool = False  # the first token written decides: nothing is fetched or put away until the next prompt
    needs: str = ""  # what only the text can tell: "surprise" or "sentences"

    def __post_init__(self) -> None:
        for name in ("window", "sinks", "near"):
            size = getattr(self, name)
            if size is not None and size < (name != "sinks"):
                raise BadParameter(f"{name}={size} is too small; use {int(name != 'sinks')} or more.")
        if not 0 <= self.neighbours < 1:
            raise BadParameter(f"neighbours={self.neighbours} is a share; use 0 or more, less than 1.")

    @property
    def moves(self) -> bool:
        """Keys are put away without their position."""
        return self.far != "true"

    def sizes(self, budget: int) -> Sizes:
        """What a budget is made of, beside the units fetched; the usual, where a fraction cannot hold what is asked."""
        asked = self._asked(budget)
        return asked if asked.least <= budget else replace(self, sinks=None, near=None)._asked(budget)

    def _asked(self, budget: int) -> Sizes:
        sinks = min(self.usual[0], budget // 16) if self.sinks is None else self.sinks
        near = max(1, min(self.usual[1], budget // 4)) if self.near is None else self.near
        return Sizes(sinks, near, self.cut.size(budget))

    def check(self, budget: int, name: str) -> None:
        asked = self._asked(budget)
        if asked.least > budget:
            raise BudgetTooSmall(
                f"budget={budget} cannot hold the {asked.sinks} sinks, {asked.near} near tokens and one unit of "
                f"{asked.unit} that '{name}' attends to; use a budget of {asked.least} or more, or smaller sizes."
            )


def check_probe(probe: str) -> None:
    if probe not in ("bias", "mean"):
        raise BadParameter(f"probe='{probe}' is not known; use 'bias' or 'mean'.")
