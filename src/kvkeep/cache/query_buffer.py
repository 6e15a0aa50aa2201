"""The newest queries of every layer and row, and the eviction candidates they are scored with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.evictor import EvictionCandidate
from kvkeep.cache.padding import BatchLayout
from kvkeep.compress.method import Method
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.storage.ragged import RaggedLayer
from kvkeep.types import NOTHING, Observation, Rotate, Softmax, Tokens, stay

OutputWeight = Callable[[int], Tensor] | None  # of a layer [heads, hidden, dim]; None: no method needs it


@dataclass(frozen=True)
class Found:
    """What passes after a prompt found out about one row of a layer."""

    scores: Tensor | None = None  # [kv_heads, new] of the newest tokens: their token state
    queries: Tensor | None = None  # [heads, q, dim] to score with, in place of the text's last


class QueryBuffer:
    """Holds the observation window: of a prompt prefilled in chunks, and of decode steps if they are evicted after."""

    def __init__(
        self,
        method: Method,
        layers: list[int],
        decoding: bool,
        rotations: Mapping[int, Rotation | None],
        output_weight: OutputWeight,
    ):
        self.output_weight = output_weight
        self.method, self.layers, self.rotations = method, layers, rotations
        self.observation_window = 0 if method.memory and method.memory.sees_all else method.observation_window
        self.decoding = decoding and (self.observation_window > 1 or bool(method.summary)) and not method.memory
        self.queries: dict[tuple[int, int], Tensor] = {}  # (layer, row) -> newest queries [heads, w, dim]
        self.before: dict[tuple[int, int], Tensor | None] = {}  # of those changed by a pass that has not completed
        self.shared: dict[Any, Tensor] = {}  # what all layers of a forward pass compute alike
        self.observe_from = 0  # position of the first query that is summed over, of methods that do

    @property
    def nbytes(self) -> int:
        return sum(queries.untyped_storage().nbytes() for queries in self.queries.values())

    def num_held(self, row: int) -> int:
        """Queries that are held of a row's newest tokens, in every layer."""
        return min(self.queries[i, row].shape[1] if (i, row) in self.queries else 0 for i in self.layers)

    def begin(self, counts: Sequence[int]) -> None:
        """Drop the prompt's queries of rows that decode, unless decode steps evict, too."""
        self.commit()
        if not self.decoding:
            over = {row for row, count in enumerate(counts) if count == 1}
            self.queries = {key: queries for key, queries in self.queries.items() if key[1] not in over}

    def append(self, index: int, query: Tensor, layout: BatchLayout) -> None:
        """Add the queries of a pass that is not evicted from yet. query [rows, heads, q, dim]"""
        for row, count in enumerate(layout.counts):
            if count:
                self.before[index, row] = self.queries.get((index, row))
                queries = self._counted(layout.unpad(query, row).detach(), layout.seen[row])
                self._append(index, row, queries, layout.seen[row] + count - queries.shape[1])

    def commit(self) -> None:
        self.before.clear()
        self.shared = {}

    def rollback(self) -> None:
        """Drop the step of a forward pass that did not complete."""
        self.queries |= {key: queries for key, queries in self.before.items() if queries is not None}
        for key in [key for key, queries in self.before.items() if queries is None]:
            self.queries.pop(key, None)
        self.commit()

    def select_rows(self, rows: Sequence[int]) -> None:
        old, layers = self.queries, self.layers
        self.queries = {(i, new): old[i, row] for i in layers for new, row in enumerate(rows) if (i, row) in old}

    def observe(
        self, index: int, call: AttentionCall, layout: BatchLayout, layer: RaggedLayer, lse: Tensor | None = None
    ) -> list[EvictionCandidate]:
        """Every row of a layer, new tokens included. lse [rows, heads, q]"""
        rows = []
        for row, count in enumerate(layout.counts):
            tokens = layer.dense(row) if layer else self.first_tokens(row, call, layout)
            lengths = layer.row_lengths(row) if layer else [count] * call.key.shape[1]
            if not count:
                rows.append(EvictionCandidate(None, tokens, lengths, False))
                continue
            queries = self._counted(layout.unpad(call.query, row).detach(), layout.seen[row])
            if lse is not None:
                lse = lse[..., count - queries.shape[1] :]
            if count > 1 or not layout.seen[row] or self.decoding:
                self.before[index, row] = self.queries.get((index, row))
                queries = self._append(index, row, queries, layout.seen[row] + count - queries.shape[1])
            observation = replace(
                self.observation(index, queries, call.how, tokens, lengths, layout.seen[row] + count, count),
                lse=None if lse is None else lse[row], whole=layout.expected,
                memo=call.memo if len(layout.counts) == 1 else None,
            )  # fmt: skip
            rows.append(EvictionCandidate(observation, tokens, lengths, layout.evict_now[row]))
        return rows

    def stored(
        self, index: int, row: int, how: Softmax, layer: RaggedLayer, seq_len: int, found: Found, evict_now: bool
    ) -> EvictionCandidate:
        """A row as it is between two forward passes."""
        tokens, lengths, queries = layer.dense(row), layer.row_lengths(row), found.queries
        if queries is None:
            queries = self.queries.get((index, row), tokens.keys[:0])
        new = 0 if found.scores is None else found.scores.shape[1]
        seen = self.observation(index, queries, how, tokens, lengths, seq_len, new)
        if found.scores is not None:
            state = seen.token_state.scatter(1, seen.newest[..., None], found.scores[..., None])
            seen, tokens = replace(seen, token_state=state), replace(tokens, token_state=state)
        return EvictionCandidate(seen, tokens, lengths, evict_now)

    def keep_decoded(self, queries: Mapping[int, Tensor]) -> None:
        """Hold the newest queries of the one row, if a later step is evicted after. [heads, q, dim] each"""
        if self.decoding:
            self.queries |= {(index, 0): each for index, each in queries.items()}

    def observation(
        self, index: int, queries: Tensor, how: Softmax, tokens: Tokens, lengths: Sequence[int], seq_len: int, new: int
    ) -> Observation:
        return Observation(
            queries, tokens.keys, tokens.values, tokens.token_positions, tuple(lengths), seq_len, new,
            *how, tokens.parts.get("token_state", NOTHING),
            self.layers.index(index), len(self.layers), rotate=self._rotate(index), shared=self.shared,
            output_weight=self.output_weight(index) if self.output_weight else None,
        )  # fmt: skip

    def first_tokens(self, row: int, call: AttentionCall, layout: BatchLayout) -> Tokens:
        """The tokens of a row whose layer is empty, as [kv_heads, n, …]: views where nothing is padded."""
        keys, values = (layout.unpad(t, row).detach() for t in (call.key, call.value))
        return self._whole(keys, values, layout.positions[row])

    def past_tokens(self, keys: Tensor, values: Tensor, token_state: Tensor | None) -> Tokens:
        """All KV heads' tokens of a history, from the first on. [kv_heads, n, dim]; token_state: of the first"""
        where = torch.arange(keys.shape[1], dtype=torch.int32, device=keys.device)
        whole = self._whole(keys, values, where)
        if token_state is not None and whole.token_state is not None:
            whole.token_state[:, : token_state.shape[1]] = token_state
        return whole

    def _whole(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tokens:
        """Tokens that all KV heads hold, with empty token state."""
        positions, token_state = positions.expand(len(keys), -1), None
        if self.method.memory:
            token_state = keys.new_zeros(*keys.shape[:2], self.method.memory.width, dtype=torch.float32)
        return Tokens(keys, values, positions, positions.clone() if self.method.placement else None, token_state)

    def _rotate(self, index: int) -> Rotate:
        rotation = self.rotations.get(index)
        return rotation.rotate if rotation else stay

    def _counted(self, queries: Tensor, first: int) -> Tensor:
        """Drop the queries before `observe_from` where the method sums over them; first: position of the first"""
        return queries[:, max(0, self.observe_from - first) :] if self.method.sums_queries else queries

    def _append(self, index: int, row: int, queries: Tensor, first: int = 0) -> Tensor:
        """-> the row's observation window, or the summary; earlier chunks of the same prompt included

        first: position of the first of the queries
        """
        if self.method.summary:
            new, older = self.method.summary(queries, first, self._rotate(index)), self.queries.get((index, row))
            self.queries[index, row] = new if older is None else older + new
            return self.queries[index, row]
        if not (size := self.observation_window):  # no queries are scored with, or token state covers older ones
            return queries if self.method.memory else queries[:, :0]
        if (older := self.queries.get((index, row))) is not None:
            queries = torch.cat([older, queries], 1)
        self.queries[index, row] = queries[:, -size:].clone()
        return self.queries[index, row]
