"""A retrieval method as a value: how tokens are chunked into units and indexed, and which units queries retrieve.

tokens that leave the near window -> chunk into units -> build index entries -> offload
a window of queries -> one query vector -> score the units -> select units -> gather -> attend
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from kvkeep.arguments import Checked, Cosine, Count, Positive, Range
from kvkeep.compress.protocols import Chunking, RetrievalIndex
from kvkeep.errors import BudgetTooSmall


@dataclass(frozen=True)
class Sizes:
    """Tokens per KV head."""

    sinks: int
    near: int
    unit: int  # the most a retrieved unit usually takes
    left_near: int  # near tokens that a decode step leaves beside the new one, those of a filling chunk included

    @property
    def minimum(self) -> int:
        return self.sinks + self.near + self.unit


@dataclass(frozen=True)
class RetrievalConfig(Checked):
    chunking: Chunking  # tokens to offload -> the unit of each
    index: RetrievalIndex  # builds the units' index entries, and scores them for queries
    window: Positive | None = 256  # queries that retrieve together; None: a prompt is prefilled with full attention
    far_positions: Literal["edge", "contiguous", "original"] = "edge"  # of retrieved tokens, relative to a query
    sinks: Count | None = None
    near: Positive | None = None
    default_sizes: tuple[int, int] = (64, 512)  # sinks, near tokens if not given; at most a 16th, a 4th of the budget
    density: bool | Literal["reverse"] = False  # while decoding, layers share the quota by the entropy of their scores
    neighbours: Annotated[float, Range(0, below=1)] = 0.0  # this share of what is retrieved are units beside the best
    similar: Cosine | None = None  # while decoding, retrieve again only when the query is less similar to the last one
    once: bool = False  # the first decoded token decides: no retrieval or offloading until the next prompt
    needs: str = ""  # token marks that only the text gives: "surprise" or "sentences"

    @property
    def moves_keys(self) -> bool:
        """Keys are offloaded without their rotation."""
        return self.far_positions != "original"

    def sizes(self, budget: int) -> Sizes:
        """The fixed parts of a budget; the defaults where a fractional budget cannot hold what was requested."""
        requested = self._requested(budget)
        if requested.minimum <= budget:
            return requested
        return replace(self, sinks=None, near=None)._requested(budget)

    def _requested(self, budget: int) -> Sizes:
        sinks = min(self.default_sizes[0], budget // 16) if self.sinks is None else self.sinks
        near = max(1, min(self.default_sizes[1], budget // 4)) if self.near is None else self.near
        unit = self.chunking.size(budget)
        return Sizes(sinks, near, unit, near - unit if self.chunking.uniform and unit <= near else near)

    def check(self, budget: int, name: str) -> None:
        sizes = self._requested(budget)
        if sizes.minimum > budget:
            raise BudgetTooSmall(
                f"budget={budget} cannot hold the {sizes.sinks} sinks, {sizes.near} near tokens and one unit of "
                f"{sizes.unit} that '{name}' attends to; use a budget of {sizes.minimum} or more, or smaller sizes."
            )
