"""What a decode step needs of a cache, and an engine's batch of a pool: rows of different sequences."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from kvkeep.model.hf_cache import HFCacheAdapter


class DecodeRows(HFCacheAdapter):
    """A cache of many rows, decoded one token at a time: the first rows are those of a forward pass."""

    seen = 1  # not empty; every row has position ids of its own

    @abstractmethod
    def graph_capture_scratch(self) -> AbstractContextManager[None]:
        """Within, forward passes change nothing: no row is in use."""


class DecodePool(DecodeRows):
    """Rows of an engine's requests, which come and go."""

    mixed = False  # rows may be of any methods and budgets
    moves = False  # keys and values of a row are here alone, and not in its cache
    rows: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of its buffers."""

    @abstractmethod
    def admit(self, row: int, cache: Any, answer: int) -> None:
        """Copy a cache of one row, with room for so many more tokens."""

    @abstractmethod
    def complete(self, row: int, cache: Any, count: int) -> None:
        """Bring the cache of an admitted row to what it is after `count` decoded tokens."""

    @abstractmethod
    def release(self, row: int) -> None:
        """Free a row."""

    def begin_step(self) -> bool:
        """Called before every step. -> whether buffers were replaced, so that captured steps are lost"""
        return False
