"""What each row of a layer brings to the contest: its tokens, and the queries that judge them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.cache.layer import LayerCache
from kvkeep.compress.method import Method
from kvkeep.engine.arrival import Arrival
from kvkeep.engine.contest import Contestant
from kvkeep.model.attention import Handover
from kvkeep.types import Observation, Tokens


class Observer:
    """Remembers a prompt's newest queries while it comes in pieces."""

    def __init__(self, method: Method, layers: list[int]):
        self.method, self.layers = method, layers
        self.voters: dict[tuple[int, int], Tensor] = {}  # (layer, row) -> newest queries

    @property
    def nbytes(self) -> int:
        return sum(queries.untyped_storage().nbytes() for queries in self.voters.values())

    def end_prompts(self, counts: Sequence[int]) -> None:
        """A row that gets a single token is decoding: its prompt is over, and its queries are not needed any more."""
        over = {row for row, count in enumerate(counts) if count == 1}
        self.voters = {who: queries for who, queries in self.voters.items() if who[1] not in over}

    def take(self, rows: Sequence[int]) -> None:
        old, layers = self.voters, self.layers
        self.voters = {(i, new): old[i, row] for i in layers for new, row in enumerate(rows) if (i, row) in old}

    def look(
        self, index: int, new: Handover, arrival: Arrival, seen: Sequence[int], layer: LayerCache
    ) -> list[Contestant]:
        """Every row of a layer, its new tokens included. seen: tokens of each row before them"""
        rows = []
        for row, count in enumerate(arrival.counts):
            tokens = layer.dense(row) if layer else self._incoming(row, new, arrival)
            lengths = layer.row_lengths(row) if layer else [count] * new.key.shape[1]
            if not count or (count == 1 and seen[row]):  # nothing new, or decoding: this row does not compete
                rows.append(Contestant(None, tokens, lengths))
                continue
            queries = self._voters(index, row, arrival.real(new.query, row).detach())
            observed = Observation(
                queries, tokens.keys, tokens.values, tokens.positions, tuple(lengths), seen[row] + count,
                new.scale, new.softcap, new.sinks, tokens.notes, self.layers.index(index), len(self.layers),
            )  # fmt: skip
            rows.append(Contestant(observed, tokens, lengths))
        return rows

    def _incoming(self, row: int, new: Handover, arrival: Arrival) -> Tokens:
        """A row's first tokens as [kv_heads, n, …], views where nothing is padded."""
        keys, values = (arrival.real(t, row).detach() for t in (new.key, new.value))
        spots = arrival.positions[row].expand(len(keys), -1)
        notes = None
        if self.method.memory:
            notes = keys.new_zeros(*keys.shape[:2], self.method.memory.width, dtype=torch.float32)
        return Tokens(keys, values, spots, spots if self.method.place else None, notes)

    def _voters(self, index: int, row: int, queries: Tensor) -> Tensor:
        """The row's newest queries, those of earlier pieces of the same prompt included."""
        if self.method.memory:  # older queries are in the notes
            return queries
        if not (wanted := self.method.voters):
            return queries[:, :0]
        if (older := self.voters.get((index, row))) is not None:
            queries = torch.cat([older, queries], 1)
        self.voters[index, row] = queries[:, -wanted:].clone()
        return self.voters[index, row]
