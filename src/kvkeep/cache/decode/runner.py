"""Decode steps of a model over rows that a cache of theirs holds: one way to run them, for everybody who decodes.

An engine's batches, `model.generate` on a GPU and drafts differ in what `past_key_values` is (`DecodeRows`), not in
how a step runs: captured in a CUDA graph for every number of rows that was needed so far, or as it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from kvkeep.model.cuda_graph import WARMUP_PASSES, CudaGraphRunner
from kvkeep.model.hf_cache import HFCacheAdapter, execution_device, key_shape, layer_devices
from kvkeep.model.rope import last_position
from kvkeep.storage.ragged import LayerKind
from kvkeep.storage.rows import restored


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

    def room_for(self, cache: Any, answer: int) -> int:
        """Tokens per KV head that a cache needs room for, beside its own, for an answer of so many."""
        return answer

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


class Runner:
    """Each call decodes one token of the first rows: the likeliest next one takes its place."""

    def __init__(self, pool: Any, rows: int, forward: Callable[..., Any] | None = None, captures: bool = True) -> None:
        """pool: what the model sees as its cache; rows: the most there will be; forward: the model's, None: as it is"""
        self.pool, self.forward, self.captures = pool, forward, captures
        home = execution_device(pool.model)
        self.tokens, self.positions = torch.zeros(2, rows, 1, dtype=torch.int64, device=home)
        self.last_position = last_position(pool.model)
        self.graphs: dict[int, CudaGraphRunner] = {}  # by number of rows
        self.sizes = set[int]()  # numbers of rows that were ever captured: all is compiled for them

    def __call__(self, rows: int) -> Tensor:
        """-> logits of the next tokens [rows, vocabulary], in the same memory every time"""
        return self.prepare(rows)()

    def prepare(self, rows: int) -> Callable[[], Tensor]:
        """The step of so many rows. It is captured now, if it was not yet."""
        if not self.captures:
            return self._step(rows)
        if rows not in self.graphs:
            self.graphs[rows] = self._capture(rows)
        return self.graphs[rows]

    def _step(self, rows: int) -> Callable[[], Tensor]:
        pool, forward, last = self.pool, self.forward, self.last_position  # and not self, which has the graphs
        tokens, positions = self.tokens[:rows], self.positions[:rows]
        return lambda: decode_step(pool, forward or pool.model, tokens, positions, last)

    def _capture(self, rows: int) -> CudaGraphRunner:
        """Capturing runs the step; tokens, positions and the pool stay as they are."""
        passes = 1 if rows in self.sizes else WARMUP_PASSES
        with restored([self.tokens, self.positions]), self.pool.graph_capture_scratch():
            graph = CudaGraphRunner(self._step(rows), self.pool.model, passes)
        self.sizes.add(rows)
        return graph


def layer_kinds(model: Any, layers: Sequence[int]) -> dict[int, LayerKind]:
    """The shape of these layers' keys and values, and where they are computed."""
    (kv_heads, dim), devices, home = key_shape(model), layer_devices(model), execution_device(model)
    return {i: LayerKind(kv_heads, dim, dim, model.dtype, devices.get(i, home)) for i in layers}


def decode_step(pool: Any, forward: Callable[..., Any], tokens: Tensor, positions: Tensor, last: int) -> Tensor:
    """One token of every row. tokens, positions [rows, 1]: become the next ones. -> logits [rows, vocabulary]"""
    logits = forward(tokens, position_ids=positions, past_key_values=pool).logits[:, -1]
    torch.argmax(logits, -1, keepdim=True, out=tokens)
    positions.add_(1).clamp_max_(last)
    return logits
