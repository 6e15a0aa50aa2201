"""Eviction after a prefill: every layer's tokens are scored, and the kept ones stored.

Most methods select layer by layer, so only one layer is ever held uncompressed. A method that compares layers
(`layer_weight`) needs all of them first; its layers stay pending here, uncompressed, until the last one. Where layers
compete for one budget (`across_layers`), tokens that have no chance are evicted while the others wait.

A text that is held until the model has run again is selected from first: the evictor is given the tokens' slots in the
place of their keys (`SelectedLayer`), so that nothing is copied before all layers have decided.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from kvkeep.cache.gathered_heads import gather_heads, own_heads
from kvkeep.cache.reach import placed
from kvkeep.compress.budget.heads import Candidates, best_of, coverage_of
from kvkeep.compress.method import Method
from kvkeep.compress.pipeline import (
    PlacedSelection,
    candidates,
    decide,
    fits,
    layer_budgets,
    update_token_state,
)
from kvkeep.compress.positions import PlacementInput, move_within, reserved
from kvkeep.compress.protocols import LayerWeight
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.model.head_shards import HeadShards
from kvkeep.storage.ragged import LayerKind, RaggedLayer
from kvkeep.storage.upload import Download
from kvkeep.types import Budget, Observation, Selection, Tokens

SPARE = 2  # times what will be kept: so much is held of layers that compete before the worst of it is evicted


@dataclass(frozen=True)
class EvictionCandidate:
    """One row of one layer, and all its tokens. observation is None for a row without new tokens."""

    observation: Observation | None
    tokens: Tokens
    lengths: Sequence[int]
    evict_now: bool  # False: only its token state is updated

    def slots_of(self, layer: RaggedLayer, row: int) -> EvictionCandidate:
        """The same row with its tokens' slots in the layer's buffers in the place of keys, and no values."""
        tokens, starts = self.tokens, layer.places.starts[row]
        slots = starts[:, None] + torch.arange(tokens.token_positions.shape[1], device=starts.device)
        nothing = tokens.values[..., :0]
        return replace(self, tokens=replace(tokens, keys=slots[..., None], values=nothing, rope_positions=None))


@dataclass(frozen=True)
class SelectedLayer:
    """A layer and the tokens selected of it, which stay where they are; `flat` is a copy of them."""

    layers: Mapping[int, RaggedLayer]
    index: int
    chosen: RaggedLayer  # in the place of a key, a token's slot in the source's buffers

    @property
    def source(self) -> RaggedLayer:
        return self.layers[self.index]

    @property
    def kind(self) -> LayerKind:
        return self.source.kind

    @property
    def kv_heads(self) -> int:
        return self.source.kv_heads

    @property
    def starts(self) -> list[int]:
        return self.chosen.starts

    @property
    def lengths(self) -> list[int]:
        return self.chosen.lengths

    @property
    def flat(self) -> Tokens:
        chosen = self.chosen.flat
        return replace(self.source.flat[chosen.keys[:, 0]], token_state=chosen.token_state)

    def copy(self) -> RaggedLayer:
        """A layer of the selected tokens alone."""
        layer = copy.copy(self.source)
        layer.adopt(self.flat, self.lengths, self.source.rows)
        return layer


@dataclass(frozen=True)
class UnstoredLayer:
    """A layer's kept tokens, head by head, and the heads' lengths on their way to the host."""

    index: int
    kept: Tokens  # [total, …]
    lengths: Callable[[], list[int]]  # when they have come

    @cached_property
    def nbytes(self) -> int:
        return self.kept.keys.nbytes + self.kept.values.nbytes


@dataclass
class CompetingRow:
    """One row of one layer whose tokens compete with those of other layers; or each head's, where all of them fit."""

    kept: Candidates | list[Tokens]
    seq_len: int  # 0: all of them fit

    def heads(self) -> list[Tokens]:
        return self.kept.heads() if isinstance(self.kept, Candidates) else self.kept

    @property
    def nbytes(self) -> int:
        parts = [self.kept.tokens] if isinstance(self.kept, Candidates) else self.kept
        return sum(part.keys.nbytes + part.values.nbytes for part in parts)


@dataclass
class Evictor:
    method: Method
    budget: Budget
    store: dict[int, RaggedLayer]
    rotations: dict[int, Rotation | None]
    context_length: int
    shards: HeadShards | None = None  # of other processes' heads, where the method compares heads
    covered: dict[tuple[int, int], float] = field(default_factory=dict)  # (layer, row) -> `Selection.coverage`

    def __post_init__(self) -> None:
        self.pending: dict[int, list[EvictionCandidate]] = {}
        self.competing: dict[int, list[CompetingRow]] = {}
        self.selections: dict[int, Selection | None] = {}  # row -> the selection that following layers reuse
        self.unstored: list[UnstoredLayer] = []  # stored after the last layer: the host does not wait for their lengths

    def evict(self, index: int, rows: list[EvictionCandidate], may_wait: bool) -> int:
        """Evict from this layer, or from all layers at the last one. -> the most bytes of keys and values at once

        may_wait: storing it after the last layer takes no more memory than there was before
        """
        rows = [self._update_token_state(row) for row in rows]
        evicts = any(row.observation for row in rows)
        if self.method.across_layers and evicts:
            return self._compete(index, rows)
        layer_weight = self.method.layers.layer_weight
        if layer_weight is None or not evicts:
            self._evict_layer(index, rows, [None] * len(rows), may_wait)
            return self._held({index: rows})
        self.pending[index] = rows
        most = self._held(self.pending)
        if len(self.pending) == len(self.store):
            by_row = zip(*self.pending.values(), strict=True)
            each = [self._layer_budgets([layer.observation for layer in row], layer_weight) for row in by_row]
            for layer, budgets in zip(list(self.pending), zip(*each, strict=True), strict=True):
                self._evict_layer(layer, self.pending[layer], budgets, may_wait)
                most = max(most, self._held(self.pending))
                del self.pending[layer]
        return most

    def _held(self, candidates: Mapping[int, list[EvictionCandidate]], beside: int = 0) -> int:
        """Bytes of keys and values of all layers, of candidates that are no views of them, and of so many beside."""
        beside += sum(layer.nbytes for layer in self.store.values()) + sum(layer.nbytes for layer in self.unstored)
        for index, rows in candidates.items():
            stored = self.store[index].flat.keys.untyped_storage().data_ptr()
            tokens = [row.tokens for row in rows if row.tokens.keys.untyped_storage().data_ptr() != stored]
            beside += sum(each.keys.nbytes + each.values.nbytes for each in tokens)
        return beside

    def _compete(self, index: int, rows: list[EvictionCandidate]) -> int:
        """Hold the layer's tokens that may be among the best of all layers; after the last one, store them."""
        self.competing[index] = [self._competing(row) for row in rows]
        most = self._held({index: rows}, sum(row.nbytes for layer in self.competing.values() for row in layer))
        self._free(index)
        for row in range(len(rows)):
            self._evict_worst(row, [layer[row] for layer in self.competing.values()])
        if len(self.competing) == len(self.store):
            competing, self.competing = self.competing, {}
            for layer, each in competing.items():
                self.store[layer].fill([self._place(layer, row.seq_len, row.heads()) for row in each])
        return most

    def _free(self, index: int) -> None:
        """Free a layer whose candidates were copied. Codes stay: they are compared with what will be kept."""
        if not self.store[index].bits:
            self.store[index].clear()

    def _competing(self, row: EvictionCandidate) -> CompetingRow:
        seen = row.observation
        if seen is None or fits(seen, self.method, self._tokens(seen)):
            return CompetingRow(gather_kept(row.tokens, row.lengths, None), 0)
        return CompetingRow(candidates(seen, self.method, self._tokens(seen), row.tokens), seen.seq_len)

    def _evict_worst(self, row: int, layers: list[CompetingRow]) -> None:
        """Evict what is not among the best of one row's layers, unless that is not worth a copy yet."""
        each = [(layer, layer.kept) for layer in layers if isinstance(layer.kept, Candidates)]
        if not each:
            return
        heads, unseen = [kept.kv_heads for _, kept in each], len(self.store) - len(layers)
        total = self.budget.tokens(layers[0].seq_len) * (sum(heads) + unseen * max(heads))
        if not unseen or sum(len(kept) for _, kept in each) > SPARE * total:
            needed = self.method.needed if not unseen and each[0][1].whole is not None else None
            left = best_of([kept for _, kept in each], total, needed)
            for (layer, _), best in zip(each, left, strict=True):
                layer.kept = best
            if needed is not None:
                self.covered[0, row] = coverage_of(left)

    def _update_token_state(self, row: EvictionCandidate) -> EvictionCandidate:
        """From here on, only a row that is evicted from has an observation."""
        seen, tokens, memory = row.observation, row.tokens, self.method.memory
        # while eviction is deferred, a memory of the observation window waits for the last one
        if seen and memory and (row.evict_now or memory.sees_all or seen.is_step):
            whole = update_token_state(self._all_heads(seen), self.method, self._tokens(seen)).token_state
            mine = whole[self.shards.own(len(whole)), : seen.tokens] if self.shards else whole
            seen, tokens = replace(seen, token_state=mine), replace(tokens, token_state=mine)
        return replace(row, observation=seen if row.evict_now else None, tokens=tokens)

    def _all_heads(self, seen: Observation) -> Observation:
        return gather_heads(seen, self.shards) if self.shards else seen

    def _tokens(self, observation: Observation) -> int:
        return self.budget.tokens(observation.seq_len)

    def _layer_budgets(self, layers: list[Observation | None], layer_weight: LayerWeight) -> Sequence[int | None]:
        """One row's budget in every layer."""
        seen = [each for each in layers if each]
        if not seen:
            return [None] * len(layers)
        budget = self._tokens(seen[0])
        weights = [float(layer_weight(self._all_heads(each), budget)) for each in seen]
        return layer_budgets(self.method, budget, seen[0].seq_len, weights)

    def _evict_layer(
        self, index: int, rows: list[EvictionCandidate], budgets: Sequence[int | None], may_wait: bool
    ) -> None:
        may_wait, stored = may_wait and len(rows) == 1 and self._can_wait(index), []
        for number, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
            seen = row.observation
            selection = self._select(number, seen, budget, may_wait) if seen else None
            if isinstance(selection, PlacedSelection):
                waiting = row.tokens[tuple(selection.places)]
                self.unstored.append(UnstoredLayer(index, waiting, Download(selection.counts)))
                return self._free(index)
            if selection and selection.coverage is not None:
                self.covered[index, number] = selection.coverage
            kept = gather_kept(row.tokens, row.lengths, selection)
            stored.append(self._place(index, seen.seq_len, kept) if seen and selection else kept)
        self.store[index].fill(stored)

    def _can_wait(self, index: int) -> bool:
        """Whether nothing else needs the heads' lengths before the last layer."""
        return not self.store[index].bits and not self.shards and not self.method.placement and self.method.reuse == 1

    def store_all(self) -> None:
        """Store the layers that wait for their heads' lengths."""
        while self.unstored:
            layer = self.unstored.pop(0)
            self.store[layer.index].adopt(layer.kept, layer.lengths(), rows=1)

    def _select(
        self, row: int, observation: Observation, layer_budget: int | None, may_wait: bool
    ) -> Selection | PlacedSelection | None:
        """may_wait: for lengths that the device alone knows yet"""
        if observation.layer % self.method.reuse == 0:
            seen = self._all_heads(observation)
            decided = decide(seen, self.method, self._tokens(observation), layer_budget)
            if isinstance(decided, PlacedSelection):
                if may_wait and decided.lengths is None:
                    return decided
                decided = decided.known()
            self.selections[row] = own_heads(decided, self.shards) if self.shards else decided
        return self.selections[row]

    def _place(self, index: int, seq_len: int, heads: list[Tokens]) -> list[Tokens]:
        """Rotate the kept keys to the positions the method gives them. seq_len 0: nothing was evicted"""
        if not (placement := self.method.placement) or not seq_len:
            return heads
        budget, rotation, heads_placed = self.budget.tokens(seq_len), self.rotations[index], []
        for head in heads:
            where = PlacementInput(head.token_positions, seq_len, budget, self.context_length)
            room = min(reserved(self.context_length), self.context_length - len(head.token_positions))
            positions = move_within(placement(where), seq_len + room - self.context_length)
            heads_placed.append(placed(head, positions, rotation))
        return heads_placed

    def place_rows(self, index: int, rows: list[list[Tokens]], source: RaggedLayer) -> list[list[Tokens]]:
        """The same for rows that were selected from a layer; those of which nothing was evicted stay."""
        if not self.method.placement:
            return rows
        ends = [int(source.row(row)[0].token_positions[-1]) + 1 for row in range(len(rows))]
        lengths = ([len(head.token_positions) for head in heads] for heads in rows)
        whole = [n == source.row_lengths(row) for row, n in enumerate(lengths)]
        return [self._place(index, 0 if whole[row] else ends[row], heads) for row, heads in enumerate(rows)]

    def end_pass(self) -> None:
        self.pending, self.competing, self.selections = {}, {}, {}

    def clear(self) -> None:
        """Drop what is pending of a forward pass that was cut short."""
        self.end_pass()
        self.unstored = []


def gather_kept(tokens: Tokens, lengths: Sequence[int], selection: Selection | None) -> list[Tokens]:
    """Each KV head's selected tokens; None: all. A reused selection may be on another device."""
    if selection is None:
        return [tokens[h, :n] for h, n in enumerate(lengths)]
    index = selection.index.to(tokens.keys.device)
    if len(set(selection.lengths)) == 1:
        heads = torch.arange(len(selection.lengths), device=index.device)[:, None]
        kept = tokens[heads, index]
        return [kept[h] for h in range(len(selection.lengths))]
    return [tokens[h][index[h, :n]] for h, n in enumerate(selection.lengths)]
