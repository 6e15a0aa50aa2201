"""What a cache does with its tokens in one forward pass: one protocol, two backends (eviction.py, retrieval.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from kvkeep.cache.padding import BatchLayout, PaddingTracker
from kvkeep.cache.reach import KeyReach
from kvkeep.cache.report import Report
from kvkeep.cache.self_check import AttentionCheck
from kvkeep.compress.method import Method
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.storage.ragged import RaggedLayer
from kvkeep.types import Budget


class CacheBackend(Protocol):
    """`begin`, `attend` for every layer, then `commit`; or `rollback`, where the pass was cut short."""

    budget: Budget
    peak_bytes: int  # the most keys and values at once, as far as measured
    attention_check: AttentionCheck

    @property
    def store(self) -> dict[int, RaggedLayer]:
        """What is kept, by layer; empty where tokens are offloaded instead."""

    @property
    def reach(self) -> KeyReach | None:
        """How far back queries may look, of a method that gives kept keys positions of their own."""

    def begin(self, layout: BatchLayout) -> None:
        """A forward pass begins."""

    def attend(self, index: int, call: AttentionCall, layout: BatchLayout) -> tuple[Tensor, Tensor | None]:
        """All that happens in one layer: append, attend, evict or offload. -> the result of an attention function"""

    def commit(self) -> None:
        """The forward pass went through all layers."""

    def settle(self) -> None:
        """Wait for what the device has still to tell of it."""

    @property
    def has_history(self) -> bool:
        """All tokens seen are on the host, too: whatever is lost of a forward pass can be made again."""

    @property
    def is_dirty(self) -> bool:
        """Layers went through a forward pass that is not committed."""

    @property
    def can_rollback(self) -> bool:
        """All layers can be restored to their state before it."""

    def rollback(self) -> None:
        """Restore them."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed."""

    def fork(self) -> CacheBackend:
        """An independent copy."""

    def positions(self, layer: int) -> list[list[Tensor]]:
        """Token positions of the tokens a layer attends to: [row][KV head] -> [n]"""

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values on the device, measured on their storages, with scales and mins."""

    def report(self, tokens_seen: Sequence[int]) -> Report:
        """What is held, but for the parts of the text."""


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
