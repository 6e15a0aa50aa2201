"""The eviction backend: one layer of one forward pass appends, attends, and evicts where that is due.

A prefill evicts each row down to its budget, scored by the row's newest queries (evictor.py). Decode steps append.
Where each evicts one token of every KV head for the new one, the tokens are in other buffers (cache_steps.py), until
something else is done with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache.decode.cache_steps import CacheSteps
from kvkeep.cache.evictor import EvictionCandidate, Evictor, SelectedLayer, gather_kept
from kvkeep.cache.padding import BatchLayout
from kvkeep.cache.query_buffer import Found, OutputWeight, QueryBuffer
from kvkeep.cache.reach import KeyReach
from kvkeep.cache.replay import LayerRows
from kvkeep.cache.report import Report
from kvkeep.cache.self_check import AttentionCheck
from kvkeep.compress.budget.heads import AdaptiveHeads, HeadsOfLayers
from kvkeep.compress.method import Draft, Method
from kvkeep.compress.pipeline import PlacedSelection, compress, decide
from kvkeep.compress.step_rule import StepRule
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.model.head_shards import HeadShards
from kvkeep.model.hf_attention import AttentionCall, attend_with_lse
from kvkeep.storage.history import History, StreamedLayers
from kvkeep.storage.ragged import LayerSnapshot, RaggedLayer
from kvkeep.types import Budget, Softmax, Tokens

Held = Callable[[int], tuple[Tokens, list[int]]]  # a layer's tokens, and how many each KV head has


@dataclass(frozen=True)
class Guessed:
    """Tokens that one layer was given and may have to give back, and its state before them."""

    before: LayerSnapshot | None  # None: it did not change
    key: Tensor  # [rows, kv_heads, q, dim]
    value: Tensor
    layout: BatchLayout


@dataclass
class EvictingBackend:
    """Keeps each layer's tokens in ragged buffers: append, attend, and evict down to the budget when that is due.

    `begin` a forward pass, `attend` for every layer, then `commit`; or `rollback`, where the pass was cut short.
    """

    method: Method
    budget: Budget
    layers: list[int]
    rotations: dict[int, Rotation | None]
    attention_check: AttentionCheck
    context_length: int
    bits: int | None
    shards: HeadShards | None = None  # where other processes have the other heads
    output_weight: OutputWeight = None

    def __post_init__(self) -> None:
        store = {i: RaggedLayer(self.bits) for i in self.layers}
        decoding = self.method.schedule.every is not None
        self.query_buffer = QueryBuffer(self.method, self.layers, decoding, self.rotations, self.output_weight)
        shards = None if self.method.per_head else self.shards
        in_place = shards is None and not (self.bits or self.query_buffer.decoding)
        self.steps = CacheSteps(
            store, StepRule(self.method, self.budget, self.context_length, in_place), self.rotations
        )
        self.evictor = Evictor(self.method, self.budget, store, self.rotations, self.context_length, shards)
        self.key_reach = KeyReach(store, self.rotations, self.context_length) if self.method.placement else None
        self.snapshots: dict[int, LayerSnapshot | None] = {}  # before the forward pass; None: cannot be restored
        self.guessed: dict[int, Guessed] = {}  # of the last forward pass
        self.how: dict[int, Softmax] = {}  # of each layer that holds a whole prompt
        self.selected: dict[int, SelectedLayer] = {}  # layers of such a prompt that are to be evicted from
        self.history: History | None = None  # of all tokens seen; None: what is evicted is gone
        self.stored_bytes = 0  # of a history that others have
        self.token_states: dict[int, Tensor] = {}  # of a prompt in several passes, by layer [kv_heads, n, k]
        self.new_states: dict[int, Tensor] = {}  # after the pass under way
        self.peak_bytes = 0

    @property
    def store(self) -> dict[int, RaggedLayer]:
        """What is kept, by layer."""
        self.steps.leave()
        self.evict_selected()
        return self.steps.store

    @property
    def prompt(self) -> Mapping[int, RaggedLayer]:
        """The layers of a prompt that is to be evicted from after more passes."""
        if not (self.is_on_host and self.history):
            return self.store
        return StreamedLayers(self.layers, self.history, self._read)

    @property
    def is_on_host(self) -> bool:
        """Whether a history has all tokens, and the device none."""
        return self.history is not None and not any(self.steps.store.values())

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token's keys and values in all layers, in the model's dtype."""
        if self.is_on_host and self.history:
            return self.history.full_bytes // self.history.tokens
        return sum(layer.kind.slot_bytes * layer.kv_heads for layer in self.store.values())

    @property
    def reach(self) -> KeyReach | None:
        """How far back queries may look, of a method that gives kept keys positions of their own."""
        return None if self.steps.rows else self.key_reach  # which move keys at every step

    def begin(self, layout: BatchLayout) -> None:
        self.snapshots, self.guessed = {}, {}
        self.evict_selected()
        if self.history and self.history.tokens != layout.seen[0]:
            self.history = None  # tokens were decoded since
        self.query_buffer.begin(layout.counts)
        self.steps.begin(layout)

    def attend(self, index: int, call: AttentionCall, layout: BatchLayout) -> tuple[Tensor, Tensor | None]:
        """All that happens in one layer. -> the result of an attention function"""
        if self.steps.under_way:
            return self.steps.attend(index, call, layout)
        layer = self.store[index]
        if layout.guessed:
            return self._attend_guesses(index, layer, call, layout)
        if self.history and not layout.is_step:
            return self._attend_to_history(index, self.history, call, layout)
        return self._attend_over_layer(index, layer, call, layout)

    def _attend_to_history(
        self, index: int, history: History, call: AttentionCall, layout: BatchLayout
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to all tokens seen, whatever was evicted; until it is evicted from, nothing is held of the prompt."""
        layer = self.steps.store[index] = self._read(history, index, call.query.shape[2])
        result = self._attend_over_layer(index, layer, call, layout)
        history.append(index, call.key[0].detach(), call.value[0].detach())
        if layout.is_deferred or self._is_read_again(layout):
            if (state := self.steps.store[index].dense(0).token_state) is not None:
                self.new_states[index] = state
            self.steps.store[index] = RaggedLayer(self.bits)
        return result

    def _is_read_again(self, layout: BatchLayout) -> bool:
        """Whether passes after this one, which is the prompt's last, read all layers from the host."""
        draft = self.method.draft
        return any(layout.evict_later or ()) and not (draft and draft.hold)

    def _read(self, history: History, index: int, room: int = 0) -> RaggedLayer:
        """A layer of all tokens seen, with room for so many more."""
        layer = RaggedLayer(self.bits)
        if (past := history.read(index, room=room)) is not None:
            tokens = self.query_buffer.past_tokens(*past, self.token_states.get(index))
            kv_heads, slots = tokens.token_positions.shape
            flat = tokens.map(lambda part: part.flatten(0, 1))
            layer.adopt(flat, [history.tokens] * kv_heads, 1, [slots] * kv_heads)
            self.count_beside(layer.nbytes)
        return layer

    def _attend_over_layer(
        self, index: int, layer: RaggedLayer, call: AttentionCall, layout: BatchLayout
    ) -> tuple[Tensor, Tensor | None]:
        self.snapshots[index] = layer.snapshot(several=layout.guesses is not None)
        holds = layout.evict_later is not None
        layer.whole = layout.is_deferred
        if layer.bits and (layer.whole or holds):
            self.snapshots[index] = None  # codes of older tokens cannot be restored beside new ones
        result, lse = self._attend(layer, call, layout)
        self.attention_check.check(index, call, layout, layer)
        if holds:
            self._hold(index, call, layout, layer)
            return result
        if not layout.frozen:
            self._evict(index, call, layout, layer, lse)
        layer.quantize()
        return result

    @torch.no_grad()
    def select(
        self, method: Method, seen: Sequence[int], due: Sequence[bool], scores: LayerRows, queries: LayerRows
    ) -> dict[int, SelectedLayer]:
        """Select what a method keeps of the rows of a held text that are due. No layer changes, and none is copied.

        seen: tokens of each row; scores, queries: what passes after the text found, see `Found`
        """
        prompt, chosen = self.prompt, {i: RaggedLayer() for i in self.layers}
        evictor = replace(self.evictor, method=replace(method, placement=None), store=chosen)
        for index, layer in prompt.items():
            if layer.codes:  # of a fork
                layer.hold(layer.all_rows())
            rows = []
            for row in range(layer.rows):
                found = Found(scores.get((index, row)), queries.get((index, row)))
                held = self.query_buffer.stored(index, row, self.how[index], layer, seen[row], found, due[row])
                rows.append(held.slots_of(layer, row))
            evictor.evict(index, rows, may_wait=True)
            if self.is_on_host and evictor.pending:  # a method that compares layers sees all of them
                self.count_beside(layer.nbytes * len(evictor.pending))
        evictor.store_all()
        self.query_buffer.shared = {}
        return {i: SelectedLayer(prompt, i, chosen[i]) for i in prompt}

    def evict_selected(self) -> None:
        """Evict from the layers of `selected`, one after the other. Cut short, this goes on with their next use."""
        while self.selected:
            index = next(iter(self.selected))
            held = self.steps.store[index]
            if not held or held is self.selected[index].source:  # else it was evicted from before this was cut short
                self.steps.store[index] = self._evicted(index, self.selected[index])
            del self.selected[index]
            self.token_states.pop(index, None)

    @torch.no_grad()
    def _evicted(self, index: int, selected: SelectedLayer) -> RaggedLayer:
        """A layer of the selected tokens alone."""
        layer = selected.copy()
        self.count_beside(layer.nbytes)
        if not (layer.bits or self.method.placement):
            return layer
        changed = copy.copy(selected.source)  # its codes are compared with what is kept
        changed.fill(self.evictor.place_rows(index, layer.all_rows(), selected.source))
        self.count_beside(layer.nbytes + changed.nbytes)
        return changed

    def count_beside(self, nbytes: int) -> None:
        """Count so many bytes of keys and values that are held at this time beside the layers."""
        self.peak_bytes = max(self.peak_bytes, self.nbytes + nbytes)

    def _hold(self, index: int, call: AttentionCall, layout: BatchLayout, layer: RaggedLayer) -> None:
        """A prompt after which the model runs again, before anything is evicted: it stays, in the model's dtype."""
        self.how[index] = call.how
        if not layer:
            rows = [self.query_buffer.first_tokens(row, call, layout) for row in range(len(layout.counts))]
            self.attention_check.check_nan(row.keys for row in rows)
            layer.hold([gather_kept(row, [row.keys.shape[1]] * len(row.keys), None) for row in rows])
        self.query_buffer.append(index, call.query, layout)
        self.count_beside(call.key.nbytes + call.value.nbytes)
        if self.method.draft and self.method.draft.hold:
            self._evict_for_draft(index, layer, layout, self.method.draft)

    @torch.no_grad()
    def _evict_for_draft(self, index: int, layer: RaggedLayer, layout: BatchLayout, draft: Draft) -> None:
        """Evict rows whose prompt ends here down to what their draft is decoded from."""
        seen = [before + count for before, count in zip(layout.seen, layout.counts, strict=True)]
        most = [draft.kept(self.budget.tokens(n), n) for n in seen]
        due = [ends and max(layer.row_lengths(row)) > most[row] for row, ends in enumerate(layout.evict_later or ())]
        if not any(due):
            return
        self.snapshots[index], rows = None, []  # evicted tokens cannot be restored
        for row, evicts in enumerate(due):
            held = self.query_buffer.stored(index, row, self.how[index], layer, seen[row], Found(), evicts)
            assert held.observation is not None
            chosen = compress(held.observation, draft.method, most[row]) if evicts else None
            rows.append(gather_kept(held.tokens, held.lengths, chosen))
        layer.hold(rows)

    def _attend_guesses(
        self, index: int, layer: RaggedLayer, call: AttentionCall, layout: BatchLayout
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as the decode steps of these tokens would, if the guesses are right; to the whole history, if any."""
        key, value = call.key.detach().clone(), call.value.detach().clone()  # not views of the whole prompt's
        if self.history:
            self.guessed[index] = Guessed(None, key, value, layout)
            return self._attend_history(index, self._read(self.history, index, key.shape[2]), call, layout)
        self.evictor.store_all()
        self.guessed[index] = Guessed(layer.snapshot(several=True), key, value, layout)
        spans = _decode_spans(layer, key.shape[2])
        parts = [self._attend_over_cache(layer, call.tokens(span), layout.tokens(span)) for span in spans]
        return call.to_hf_output(torch.cat(parts, 2))

    @torch.no_grad()
    def _attend_history(
        self, index: int, past: RaggedLayer, call: AttentionCall, layout: BatchLayout
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to all tokens before these guesses, and keep those of them that matter to these, if that is due."""
        if any(layout.evict_now):
            queries = Found(queries=call.query[0].detach())
            row = self.query_buffer.stored(index, 0, call.how, past, layout.seen[0], queries, True)
            self.evictor.evict(index, [row], may_wait=True)
        return call.to_hf_output(self._attend_over_cache(past, call, layout))

    def crop(self, count: int) -> None:
        """Take back the last of the tokens that were guessed; the others count as decoded."""
        if any(new.key.shape[2] > count for new in self.guessed.values()):
            self.query_buffer.begin([1])
        for index, new in self.guessed.items():
            layer, right = self.store[index], new.key.shape[2] - count
            if new.before:
                layer.restore(new.before)
            for span in _decode_spans(layer, right):
                layer.append(new.key[:, :, span], new.value[:, :, span], new.layout.tokens(span).positions, None)
            if self.history:
                self.history.append(index, new.key[0, :, :right], new.value[0, :, :right])
        if self.history:
            self.history.commit()
        self.guessed = {}

    def _attend(
        self, layer: RaggedLayer, call: AttentionCall, layout: BatchLayout
    ) -> tuple[tuple[Tensor, Tensor | None], Tensor | None]:
        """The output of attention, and each query's log-sum-exp where the method uses it and the kernel returns it."""
        if layer:
            return call.to_hf_output(self._attend_over_cache(layer, call, layout)), None
        with_lse = attend_with_lse(call) if getattr(self.method.memory, "uses_lse", False) else None
        return with_lse or (call.hf_attention(), None)

    def _attend_over_cache(self, layer: RaggedLayer, call: AttentionCall, layout: BatchLayout) -> Tensor:
        layer.append(call.key.detach(), call.value.detach(), layout.positions, layout.token_columns, layout.to_come)
        return layout.unpack(layer.attend(layout.pack(call.query), layout.counts, *call.how))

    @torch.no_grad()  # kept tokens carry no graph; with learned sinks, scores would
    def _evict(
        self, index: int, call: AttentionCall, layout: BatchLayout, layer: RaggedLayer, lse: Tensor | None
    ) -> None:
        """Evict from the rows of `evict_now`; update the token state or the queries of the others."""
        memory, is_chunk = self.method.memory, max(layout.counts) > 1
        updates = memory and (memory.sees_all if is_chunk else not getattr(memory, "prompt_only", False))
        updates = updates and layout.seen[0] + layout.counts[0] > self.query_buffer.observe_from
        if not layer or any(layout.evict_now) or updates:
            self.snapshots[index] = None  # evicted tokens cannot be restored
            rows = self.query_buffer.observe(index, call, layout, layer, lse)
            self.attention_check.check_nan(row.tokens.keys for row in rows)
            most = self.evictor.evict(index, rows, may_wait=not layer or layout.ends_deferral)
            self.peak_bytes = max(self.peak_bytes, most)
            if self.key_reach:
                self.key_reach.known = {}  # keys are placed anew
        elif is_chunk or self.query_buffer.decoding:
            self.query_buffer.append(index, call.query, layout)

    @torch.no_grad()
    def fill_decoded(
        self, held: Held, queries: dict[int, Tensor], how: dict[int, Softmax], seen: int, evicts: bool
    ) -> None:
        """Bring the tokens of the one row back, which are held elsewhere; evict as its last decode step would have."""
        self.query_buffer.keep_decoded(queries)
        for index in self.layers:
            tokens, lengths = held(index)
            observed = None
            if evicts:
                newest = queries[index], how[index]
                observed = self.query_buffer.observation(index, *newest, tokens, lengths, seen, new=1)
            self.evictor.evict(index, [EvictionCandidate(observed, tokens, lengths, evicts)], may_wait=True)
        self.evictor.store_all()
        self.evictor.end_pass()
        self.query_buffer.commit()

    @torch.no_grad()
    def select_decoded(
        self, layers: Sequence[int], queries: Tensor, tokens: Tokens, lengths: Sequence[int], how: Softmax, seen: int
    ) -> PlacedSelection:
        """What the one row keeps in some layers, after a decode step that ran elsewhere, as if they were one layer.

        queries [layers * heads, q, dim] the newest; tokens [layers * kv_heads, n, …]
        """
        method = self.method
        if isinstance(method.heads, AdaptiveHeads):
            method = replace(method, heads=HeadsOfLayers(method.heads.alpha, len(layers)))
        observed = self.query_buffer.observation(layers[0], queries, how, tokens, lengths, seen, new=1)
        selection = decide(observed, method, self.budget.tokens(seen))
        assert isinstance(selection, PlacedSelection)  # the buffer is full, and scores decide in a prefill alone
        return selection

    def commit(self) -> None:
        self.steps.commit()
        self.query_buffer.commit()
        self.evictor.end_pass()
        self.snapshots = {}
        if self.history:
            self.history.commit()
            self.token_states, self.new_states = self.new_states, {}

    def settle(self) -> None:
        """Wait for what the device has still to tell of the last forward pass."""
        self.evictor.store_all()

    @property
    def has_history(self) -> bool:
        """All tokens seen are on the host, too: whatever is lost of a forward pass can be made again."""
        return self.history is not None

    @property
    def is_dirty(self) -> bool:
        """Layers went through a forward pass that is not committed."""
        return bool(self.snapshots) or self.steps.under_way

    @property
    def can_rollback(self) -> bool:
        """All layers can be restored to their state before it."""
        return self.history is not None or None not in self.snapshots.values()

    def rollback(self) -> None:
        self.steps.rollback()
        if self.history and self.snapshots:
            self.steps.store.update({index: RaggedLayer(self.bits) for index in self.snapshots})
            self.history.rollback()
            self.snapshots, self.new_states = {}, {}
        for index, snapshot in self.snapshots.items():
            if snapshot and self.store[index]:
                self.store[index].restore(snapshot)
        self.query_buffer.rollback()
        self.evictor.clear()
        self.snapshots = {}

    def select_rows(self, rows: Sequence[int]) -> None:
        for layer in self.store.values():
            if layer:
                layer.select_rows(rows)
        self.query_buffer.select_rows(rows)
        if self.key_reach:
            self.key_reach.known = {}
        old = self.evictor.covered
        self.evictor.covered = {
            (i, new): old[i, row] for i, _ in old for new, row in enumerate(rows) if (i, row) in old
        }

    def fork(self) -> EvictingBackend:
        fork = replace(self, attention_check=self.attention_check.fork())
        fork.store.update({i: layer.copy() for i, layer in self.store.items()})
        fork.query_buffer.queries = {key: queries.clone() for key, queries in self.query_buffer.queries.items()}
        fork.peak_bytes, fork.how = self.peak_bytes, dict(self.how)
        fork.evictor.covered = dict(self.evictor.covered)
        return fork

    def positions(self, layer: int) -> list[list[Tensor]]:
        """Token positions of the tokens a layer attends to: [row][KV head] -> [n]"""
        if self.history and not self.store[layer]:  # all of it is on the host
            return [[torch.empty(0, dtype=torch.int32)] * self.history.pool.formats[layer].kv_heads]
        return self.store[layer].positions()

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values on the device, measured on their storages, with scales and mins."""
        return self.steps.nbytes

    def report(self, tokens_seen: Sequence[int]) -> Report:
        layers = [self.store[i] for i in self.layers]
        held = layers, self.query_buffer.nbytes, self.peak_bytes
        report, covered = Report.of(self.method.name, self.budget.value, tokens_seen, *held), self.evictor.covered
        if known := self.history:
            report = replace(report, host_bytes=known.nbytes, full_bytes=max(report.full_bytes, known.full_bytes))
        elif self.stored_bytes:
            report = replace(report, host_bytes=self.stored_bytes)
        return replace(report, coverage=sum(covered.values()) / len(covered)) if covered else report


def _decode_spans(layer: RaggedLayer, count: int) -> list[slice]:
    """New tokens that are appended at a time: a quantized layer may complete a group after every one."""
    if layer.bits:
        return [slice(i, i + 1) for i in range(count)]
    return [slice(0, count)] if count else []
