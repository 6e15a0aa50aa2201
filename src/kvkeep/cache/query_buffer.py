"""What each row of a layer brings to the contest: its tokens, and the queries that judge them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.cache.eviction import Contestant
from kvkeep.cache.padding import Arrival
from kvkeep.compress.method import Method
from kvkeep.model.hf_attention import Handover
from kvkeep.storage.ragged import LayerCache
from kvkeep.types import Observation, Tokens


class Observer:
    """Remembers the newest queries: of a prompt while it comes in pieces, of an answer if its tokens will compete."""

    def __init__(self, method: Method, layers: list[int], decoding: bool):
        self.method, self.layers = method, layers
        self.wanted = 0 if method.memory and method.memory.sees_all else method.voters
        self.decoding = decoding and self.wanted > 1 and not method.memory
        self.voters: dict[tuple[int, int], Tensor] = {}  # (layer, row) -> newest queries [heads, w, dim]
        # layer -> the queries of single steps since: all rows together, or row by row where some got no token
        self.steps: dict[int, deque[Tensor | list[Tensor]]] = {}
        self.noted: set[int] = set()  # layers whose last such queries are of the pass under way

    @property
    def nbytes(self) -> int:
        steps = [step for kept in self.steps.values() for step in kept]
        queries = [row for step in steps for row in ([step] if isinstance(step, Tensor) else step)]
        return sum(query.untyped_storage().nbytes() for query in [*self.voters.values(), *queries])

    def begin(self, counts: Sequence[int]) -> None:
        """A row that gets a single token is decoding: its prompt is over, and nobody may need its queries any more."""
        self.noted.clear()
        if not self.decoding:
            over = {row for row, count in enumerate(counts) if count == 1}
            self.voters = {who: queries for who, queries in self.voters.items() if who[1] not in over}

    def note_step(self, index: int, query: Tensor, arrival: Arrival) -> None:
        """Remember a single step's queries, as cheaply as can be; padding's are nobody's. query [rows, heads, q, dim]

        Rows that go on must not push out the queries of one that waits, so nothing stays beside an uneven step.
        """
        if not self.decoding:
            return
        steps, uneven = self.steps.setdefault(index, deque(maxlen=self.wanted + 1)), arrival.columns is not None
        if uneven or (steps and isinstance(steps[-1], list)):
            self._gather(index, steps)
        query = query.detach()
        steps.append([arrival.real(query, row) for row in range(len(query))] if uneven else query)
        self.noted.add(index)

    def forget_step(self) -> None:
        """The pass under way did not go through."""
        for index in self.noted:
            self.steps[index].pop()
        self.noted.clear()

    def gather(self) -> None:
        """Put the single steps' queries behind the voters they follow."""
        for index, steps in self.steps.items():
            self._gather(index, steps)
        self.steps = {}
        self.noted.clear()

    def _gather(self, index: int, steps: deque[Tensor | list[Tensor]]) -> None:
        for row in range(len(steps[0]) if steps else 0):
            self._voters(index, row, torch.cat([step[row] for step in steps], 1))
        steps.clear()

    def take(self, rows: Sequence[int]) -> None:
        self.gather()
        old, layers = self.voters, self.layers
        self.voters = {(i, new): old[i, row] for i in layers for new, row in enumerate(rows) if (i, row) in old}

    def look(
        self,
        index: int,
        new: Handover,
        arrival: Arrival,
        seen: Sequence[int],
        layer: LayerCache,
        sums: Tensor | None = None,
    ) -> list[Contestant]:
        """Every row of a layer, its new tokens included. seen: tokens of each row before them; sums [rows, heads, q]"""
        if index in self.steps:
            self.gather()
        rows = []
        for row, count in enumerate(arrival.counts):
            tokens = layer.dense(row) if layer else self._incoming(row, new, arrival)
            lengths = layer.row_lengths(row) if layer else [count] * new.key.shape[1]
            if not count:
                rows.append(Contestant(None, tokens, lengths, False))
                continue
            queries = arrival.real(new.query, row).detach()
            if count > 1 or not seen[row] or self.decoding:
                queries = self._voters(index, row, queries)
            observed = Observation(
                queries, tokens.keys, tokens.values, tokens.positions, tuple(lengths), seen[row] + count, count,
                new.scale, new.softcap, new.sinks, tokens.notes, self.layers.index(index), len(self.layers),
                None if sums is None else sums[row], new.known if len(arrival.counts) == 1 else None,
            )  # fmt: skip
            rows.append(Contestant(observed, tokens, lengths, arrival.due[row]))
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
        if not (wanted := self.wanted):  # nobody votes, or older queries are in the notes
            return queries if self.method.memory else queries[:, :0]
        if (older := self.voters.get((index, row))) is not None:
            queries = torch.cat([older, queries], 1)
        self.voters[index, row] = queries[:, -wanted:].clone()
        return self.voters[index, row]
