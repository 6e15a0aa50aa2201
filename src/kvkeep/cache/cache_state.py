"""The parts of a `kvkeep.Cache` that code below it uses."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from kvkeep.cache.padding import PaddingTracker
from kvkeep.compress.method import Method


class CacheState(Protocol):
    """What saving, validating, rewinding and decoding elsewhere need of a `kvkeep.Cache`."""

    model: Any
    config: Any
    name: str
    method: Method
    budget: int | float
    storage: str | None
    backend: Any
    tracker: PaddingTracker
    tokenizer: Any
    unreplayed: Any
    pass_end: Any
    in_forward: bool
    counts_guesses: bool
    bits: int | None
    shards: Any
    rotations: dict[int, Any]
    layers: list[Any]
    compressed_layers: list[int]

    @property
    def hf_layers(self) -> list[Any]: ...

    @property
    def seen(self) -> int: ...

    def append_decoded(self, count: int) -> None: ...

    def evict_held(self, scores: dict[tuple[int, int], Tensor], queries: dict[tuple[int, int], Tensor]) -> None: ...
