"""A transformers Cache that keeps, per row, layer and key head, only what its method chooses.

After every forward pass of more than one token, each row's kept tokens and its new ones compete for the budget, judged
by the row's newest queries. Single-token passes (decoding) only add. So a long prompt fed in chunks never holds more
than budget + chunk tokens, and every turn of a conversation ends its prefill within the budget.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.cache.layer import LayerCache, Piece
from kvkeep.compress.method import Method, parse
from kvkeep.compress.pipeline import compress
from kvkeep.engine import saving
from kvkeep.engine.arrival import Arrival, Arrivals
from kvkeep.engine.report import Report
from kvkeep.engine.watch import Watch
from kvkeep.errors import BadParameter, CacheMisuse
from kvkeep.kernels.reference import attend
from kvkeep.model.adapter import AdaptedCache, OwnedLayer
from kvkeep.model.attention import Handover
from kvkeep.types import Observation, Selection


class Cache(AdaptedCache):
    """Pass as `past_key_values` to a model's forward or generate."""

    def __init__(
        self, model: PreTrainedModel, method: str | Method = "intentkv", budget: int | float | None = None, **parameters: Any
    ):
        self.method = parse(method, **parameters)
        if budget is None and self.method.scorer is not None:
            raise BadParameter(f"'{self.method.name}' needs a budget: tokens per key head (512) or a fraction (0.1).")
        self.budget = 1.0 if budget is None else budget
        self.method.check(self.budget)
        super().__init__(model)
        self._clear()

    def _clear(self) -> None:
        self.store = {i: LayerCache() for i in self.owned}
        self.voters: dict[tuple[int, int], Tensor] = {}  # (layer, row) -> newest queries, while a prompt comes in pieces
        self.arrivals = Arrivals()
        self.watch = Watch(type(self.model).__name__)
        self.broken = False

    def attend(self, index: int, new: Handover) -> tuple[Tensor, Tensor | None]:
        """All that happens in one layer of one forward pass: append, attend, evict."""
        try:
            if index == self.owned[0]:
                self.arrival = self._arrive(new)
            layer = self.store[index]
            if layer:
                result = new.outcome(self._over_cache(layer, new))
                rows = [(layer.dense(row), layer.row_lengths(row)) for row in range(layer.rows)] if self._is_prompt(new) else []
            else:
                result = new.stock()
                self.watch.compare(new, result[0], self.arrival.columns)
                rows = self._incoming(new)
            if rows:
                layer.fill([self._winners(index, row, new, *tokens) for row, tokens in enumerate(rows)])
            if index == self.owned[-1]:
                self._leave(new)
        except BaseException:
            self._abandon()
            raise
        return result

    def _is_prompt(self, new: Handover) -> bool:
        return new.query.shape[2] > 1

    def _arrive(self, new: Handover) -> Arrival:
        if self.broken:
            raise CacheMisuse("an earlier forward pass failed halfway and left this cache unusable; reset() it or make a new one.")
        if not self._is_prompt(new):
            self.voters = {}  # the prompt is over, its queries are not needed any more
        return self.arrivals.next(new.query.shape[0], new.query.shape[2], new.padding, new.key.device)

    def _over_cache(self, layer: LayerCache, new: Handover) -> Tensor:
        layer.append(new.key.detach(), new.value.detach(), self.arrival.positions, self.arrival.columns)
        output = attend(
            new.query if self.arrival.columns is None else packed_right(new.query, self.arrival),
            layer.keys, layer.values, layer.segments, self.arrival.counts, new.scale, new.softcap, new.sinks,
        )  # fmt: skip
        return output if self.arrival.columns is None else unpacked(output, self.arrival)

    def _incoming(self, new: Handover) -> list[tuple[Piece, list[int]]]:
        """The first tokens of every row as [kv_heads, n, …], views where nothing is padded."""
        kv_heads = new.key.shape[1]
        return [
            (
                (self.arrival.real(new.key, row).detach(), self.arrival.real(new.value, row).detach(), where.expand(kv_heads, -1)),
                [len(where)] * kv_heads,
            )
            for row, where in enumerate(self.arrival.positions)
        ]

    def _winners(self, index: int, row: int, new: Handover, tokens: Piece, lengths: Sequence[int]) -> list[Piece]:
        """Let one row's tokens compete for its budget. -> per key head, what is kept"""
        if not self.arrival.counts[row]:
            return picked(tokens, lengths, None)
        self.watch.numbers(tokens[0])
        cursor = self.arrivals.seen[row] + self.arrival.counts[row]
        seen = Observation(
            self._voters(index, row, new), *tokens, tuple(lengths), cursor,
            new.scale, new.softcap, new.sinks, self.owned.index(index), len(self.owned),
        )  # fmt: skip
        return picked(tokens, lengths, compress(seen, self.method, self.method.tokens(self.budget, cursor)))

    def _voters(self, index: int, row: int, new: Handover) -> Tensor:
        """The row's newest queries, those of earlier pieces of the same prompt included."""
        queries = self.arrival.real(new.query, row).detach()
        if not (wanted := self.method.voters):
            return queries[:, :0]
        if (older := self.voters.get((index, row))) is not None:
            queries = torch.cat([older, queries], 1)
        self.voters[index, row] = queries[:, -wanted:].clone()
        return self.voters[index, row]

    def _leave(self, new: Handover) -> None:
        self.watch.settle()
        self.arrivals.settle(self.arrival, new.query.shape[2], new.padding)

    def _abandon(self) -> None:
        """A forward pass failed halfway: be empty again if it was the first, unusable if there was something to lose."""
        if self.arrivals.columns:
            self.broken = True
        else:
            self.reset()

    def reset(self) -> None:
        """Forget everything, as if new."""
        self.layers = self.fresh_layers()
        self._clear()

    def kept(self, layer: int) -> list[list[list[int]]]:
        """Where the kept tokens stood in the text: [row][key head] -> ascending positions, padding not counted."""
        if layer not in self.store:
            raise CacheMisuse(f"layer {layer} is not compressed; the compressed ones are {self.owned}.")
        store = self.store[layer]
        return [[positions.tolist() for _, _, positions in store.pieces(row)] for row in range(store.rows)]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of the compressed layers, measured on their storages."""
        return sum(layer.nbytes for layer in self.store.values())

    def report(self) -> Report:
        """What is held, and what a full cache would hold."""
        return Report.of(self.method.name, self.budget, self.arrivals.seen, [self.store[i] for i in self.owned])

    def fork(self) -> Cache:
        """An independent copy: one compressed context, many questions."""
        twin = Cache(self.model, self.method, self.budget)
        for mine, theirs in zip(self.layers, twin.layers, strict=True):
            if isinstance(mine, OwnedLayer):
                theirs.seen, theirs.is_initialized = mine.seen, mine.is_initialized
            else:
                theirs.__dict__.update(copy.deepcopy(mine.__dict__))
        twin.store = {i: layer.copy() for i, layer in self.store.items()}
        twin.voters = {who: queries.clone() for who, queries in self.voters.items()}
        twin.arrivals, twin.broken = copy.deepcopy(self.arrivals), self.broken
        return twin

    def __deepcopy__(self, memo: dict) -> Cache:
        return self.fork()

    def save(self, path: str | Path) -> None:
        """Write this cache to a folder; the model is not part of it."""
        saving.save(self, path)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel) -> Cache:
        """Read a cache that was saved with the same model."""
        return saving.load(cls, path, model)

    def _take(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed."""
        if not self.arrivals.seen:
            return
        for layer in self.store.values():
            layer.take(rows)
        self.voters = {(i, new): self.voters[i, old] for i in self.owned for new, old in enumerate(rows) if (i, old) in self.voters}
        self.arrivals.take(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._stock("reorder_cache", beam_idx)
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self._stock("batch_select_indices", indices)
        self._take(torch.arange(len(self.arrivals.seen))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._stock("batch_repeat_interleave", repeats)
        self._take([row for row in range(len(self.arrivals.seen)) for _ in range(repeats)])

    def _stock(self, name: str, argument: Any) -> None:
        for layer in self.layers:
            if not isinstance(layer, OwnedLayer):
                getattr(layer, name)(argument)

    def crop(self, *_: Any, **__: Any) -> None:
        raise CacheMisuse("a compressed cache cannot be cropped: dropped tokens do not come back; fork() it before you add.")


def picked(tokens: Piece, lengths: Sequence[int], chosen: Selection | None) -> list[Piece]:
    """The chosen tokens of each key head; all of them where nothing was chosen."""
    if chosen is None:
        return [tuple(t[h, :n] for t in tokens) for h, n in enumerate(lengths)]  # type: ignore[misc]
    return [tuple(t[h][chosen.index[h, :n]] for t in tokens) for h, n in enumerate(chosen.lengths)]  # type: ignore[misc]


def packed_right(queries: Tensor, arrival: Arrival) -> Tensor:
    """Move every row's real queries to the end. [rows, heads, q, dim]"""
    packed = torch.zeros_like(queries)
    for row, count in enumerate(arrival.counts):
        packed[row, :, queries.shape[2] - count :] = arrival.real(queries, row)
    return packed


def unpacked(output: Tensor, arrival: Arrival) -> Tensor:
    """Undo `packed_right`."""
    spread = torch.zeros_like(output)
    for row, (count, columns) in enumerate(zip(arrival.counts, arrival.columns or [], strict=True)):
        spread[row, :, columns] = output[row, :, output.shape[2] - count :]
    return spread
