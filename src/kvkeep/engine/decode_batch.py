"""What a scheduler decodes with: rows of prefilled sequences, each with one token more after a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kvkeep.engine.pooled_batch import Decoded
from kvkeep.engine.request import Request


class DecodeBatch(Protocol):
    """`PooledBatch` where decoding appends, or evicts one token of every KV head; `IndependentBatch` elsewhere."""

    @property
    def requests(self) -> list[Request]:
        """Those admitted."""

    def has_room(self, request: Request, waiting: Iterable[Request]) -> bool:
        """Whether its prefilled sequence and answer fit beside the others; raises BadInput if they would not fit alone.

        waiting: those that will be admitted next
        """

    def admit(self, request: Request) -> None:
        """Decode it from the next step on: its sequence is prefilled, its first token is sampled."""

    def release(self, request: Request) -> None:
        """Take it out, done or not."""

    def warmup(self, budget: int | float | None, rows: int, progress: Callable[[str], None]) -> None:
        """Allocate and capture for so many rows."""

    def launch(self) -> None:
        """Decode one token for every request; on a GPU, do not wait for it."""

    @property
    def replays(self) -> bool:
        """Whether `launch` replays a captured graph: that can be done in the middle of another forward pass."""

    def collect(self) -> list[Decoded]:
        """The tokens of the last step; where steps are launched ahead, of the one before. Some requests may be done."""

    def clear(self) -> None:
        """Drop all requests, whatever state a failed step has left."""
