"""A transformers Cache that keeps, per row, layer and KV head, only the tokens its method selects.

After every prefill (a forward pass of more than one token), each row's kept and new tokens are evicted down to the
budget, scored by the row's newest queries. Decode steps append, and evict when the schedule says so. So a long prompt
prefilled in chunks never holds more than budget + chunk tokens, and every turn of a conversation ends its prefill
within the budget. (Longer than most files: it is the one class that implements transformers' whole cache interface.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import serialize
from kvkeep.cache.decode import captured_decode
from kvkeep.cache.decode.captured_decode import ROOM, CapturedDecode, can_capture
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.cache.gathered_heads import check_shards
from kvkeep.cache.padding import BatchLayout, PaddingTracker
from kvkeep.cache.passes import PassEnd, run_passes
from kvkeep.cache.reach import budget_within
from kvkeep.cache.replay import LayerRows, RowText, Unreplayed, check_can_replay
from kvkeep.cache.report import Report, ShadedText, format_bytes, format_kept, kept_by_part
from kvkeep.cache.retrieval import RetrievalBackend
from kvkeep.cache.self_check import AttentionCheck
from kvkeep.compress.method import Method, Schedule, as_schedule
from kvkeep.compress.parse import parse_budget
from kvkeep.errors import BadParameter, CacheMisuse, KvkeepError
from kvkeep.model.chat import check_ids, check_tokenizer
from kvkeep.model.head_shards import head_shards
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import UNLIMITED, HFCacheAdapter, UsageTrackedLayer, context_length, has_seen, key_shape
from kvkeep.model.hf_forward import count_guesses, intercept
from kvkeep.model.projections import output_weight
from kvkeep.model.rope import rotations
from kvkeep.model.user_text import token_texts
from kvkeep.storage.history import History
from kvkeep.storage.offload.disk import DiskStore
from kvkeep.storage.offload.host import HostMemoryBudget

Backend = EvictingBackend | RetrievalBackend
IDLE = BatchLayout([], None, [], [], [])  # between forward passes


class Cache(HFCacheAdapter):
    """Pass as `past_key_values` to a model's forward or generate."""

    def __init__(
        self,
        model: Any,
        method: str | Method = "kvkeep",
        budget: int | float | str | None = None,
        *,
        schedule: str | int | Schedule | None = None,
        host_limit: int | None = None,
        disk: str | Path | None = None,
        storage: str | None = None,
        tokenizer: Any = None,
        **parameters: Any,
    ):
        """budget: tokens per KV head, or a fraction of the tokens seen; "auto": as few as make up `coverage` (0.99) of
        the method's scores or, of methods that feed the text again, score above `tau` (`kvkeep_context`: 0.01, others:
        0.003); at most `max_budget` (0.5).

        host_limit: bytes of host memory for offloaded tokens; disk: a folder for what exceeds them.

        tokenizer: for a method that tells the model what to do before it evicts (kvzip).

        storage: "int8" or "int4" quantizes every group of 32 tokens once it is complete; None: the model's dtype.
        Tokens are quantized once, and again whenever an eviction regroups them.
        """
        self.method, self.budget = parse_budget(method, budget, **parameters)
        if schedule is not None:
            self.method = replace(self.method, schedule=as_schedule(schedule))
        super().__init__(model)
        self.storage, self.bits = storage, self.method.bits(storage)
        if self.bits == 4 and (size := key_shape(self.model)[1]) % 2:
            raise BadParameter(f"storage='int4' halves keys, but those of {self.name} have {size} numbers; use 'int8'.")
        self.rotations = rotations(self.model, self.compressed_layers) if self.method.rotates else {}
        self.host_budget = HostMemoryBudget(host_limit, DiskStore(disk) if disk is not None else None)
        self.context_length = context_length(self.model)
        self.tokenizer, intercepted = tokenizer, False
        captures = self.model.device.type in captured_decode.DEVICES
        if model is self.model and (self.method.needs_passes or self.method.placement or captures):
            intercepted = intercept(self.model)
        self.counts_guesses = False
        self.shards = head_shards(self.model)
        check_shards(self)
        if self.method.needs_passes:
            check_can_replay(self, intercepted)
        if self.method.needs_output and self.compressed_layers:
            output_weight(self.model, self.compressed_layers[0])  # raises where it is not found
        self._init_state()

    def _init_state(self) -> None:
        limits = budget_within(self.method, self.budget, self.context_length)
        self.tracker = PaddingTracker(*limits, self.method.schedule)
        self.layout = IDLE  # of the current forward pass
        self.in_forward = False  # from the mask, or the first layer, to the last
        self.capture_room = ROOM  # tokens; 0: decode steps are not captured
        self.croppable = 0  # tokens of the last forward pass that can be taken back
        self.pass_end = PassEnd()  # of the next forward pass, as `ending` sets it
        self.unreplayed = Unreplayed()  # the text after which the model runs again, before it is evicted from
        self.backend = self._new_backend()

    @property
    def backend(self) -> Backend:
        """Up to date with what was decoded in a CUDA graph."""
        if self._captured:
            self._captured.settle(self.tracker.seen)
        return self._backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        self._backend = backend
        self._captured: CapturedDecode | None = None

    def captured_step(self, forward: Callable[..., Any], tokens: Tensor, positions: Tensor | None) -> Tensor | None:
        """A decode step in a CUDA graph, where that is possible. tokens, positions [rows, 1] -> logits, or None

        forward: the model's own
        """
        if self._captured and not self._captured.is_valid:
            self._drop_captured()
        if self._captured is None:
            if not (self.capture_room and can_capture(self)):
                return None
            room = next((n for n in (self.capture_room, ROOM) if self.make_room(n)), 0)
            if not room:
                return None
            self._captured = CapturedDecode(self, forward, room)
        logits = self._captured.step(tokens, self.seen if positions is None else positions)
        self.tracker.append_decoded(1)
        return logits

    def _drop_captured(self) -> None:
        """Before others change the layers. A graph that was hardly used is not worth another one, as in beam search."""
        if captured := self._captured:
            captured.settle(self.tracker.seen)
            self.capture_room, self._captured = captured.next_room, None

    @property
    def chunk_limit(self) -> int:
        """The largest number of tokens of the next forward pass: it must not attend beyond the context length."""
        return reach.chunk_limit if (reach := self.backend.reach) else UNLIMITED

    def make_room(self, tokens: int) -> bool:
        """Move keys so that so many tokens may follow before any is moved again. -> False: they are too many"""
        return self.backend.reach is None or self.backend.reach.make_room(self.tracker.seen, tokens)

    def _new_backend(self) -> Backend:
        check = AttentionCheck.of(self.model, self.name)
        how = self.method, self.tracker.budget, self.compressed_layers, self.rotations, check
        if retrieval := self.method.retrieval:
            return RetrievalBackend(*how, retrieval, self.host_budget)
        weight = partial(output_weight, self.model) if self.method.rerank else None
        return EvictingBackend(*how, self.context_length, self.bits, self.shards, weight)

    @property
    def attention_check(self) -> AttentionCheck:
        return self.backend.attention_check

    @property
    def seen(self) -> int:
        return self.tracker.padded_length

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """All that happens in one layer of one forward pass."""
        if index == self.compressed_layers[0]:
            self._begin(call)
        result = self._attend(index, call, self.layout.to(call.key.device))
        if index == self.compressed_layers[-1]:
            self._commit(call)
        return result

    def _attend(self, index: int, call: AttentionCall, layout: BatchLayout) -> tuple[Tensor, Tensor | None]:
        if not layout.guesses:
            return self.backend.attend(index, call, layout)
        parts = zip(call.split(layout.guesses.counts[0]), (layout, layout.guesses), strict=True)
        return torch.cat([self.backend.attend(index, part, tokens)[0] for part, tokens in parts], 1), None

    def begin_forward(self) -> None:
        self._rollback()
        self.in_forward = True
        for layer in self.hf_layers:
            if isinstance(layer, UsageTrackedLayer):
                layer.used = False

    def check_ready(self) -> None:
        super().check_ready()
        self.in_forward = True  # even where the mask was not made through this cache

    def _begin(self, call: AttentionCall) -> None:
        """At the first compressed layer: tell the new tokens from padding."""
        if self.backend.is_dirty:  # of a forward pass through a cache that wraps this one
            self._rollback()
        self._drop_captured()
        guesses, self.guesses = self.guesses, 0
        known = call.split(guesses)[0] if guesses else call
        rows, _, q, _ = known.query.shape
        layout = self.tracker.next_layout(rows, q, known.padding, call.key.device)
        if self.pass_end.verifies:
            layout = layout.as_guesses(self.pass_end.selects)
        if self.method.needs_passes:
            self.unreplayed.check_done(self.method.name)
            layout = layout.held_whole()
        if reach := self.backend.reach:
            layout = reach.prepare(layout, max(layout.counts) + guesses)
        self.layout = layout.with_guesses(guesses) if guesses else layout
        self.backend.begin(self.layout)
        self.in_forward = True

    def _rollback(self) -> None:
        """Undo a forward pass that was cut short, if there was one; raise where that is impossible."""
        in_step = all(has_seen(layer, self.seen, not self.in_forward) for layer in self.hf_layers)
        if not in_step or (self.seen and not self.backend.can_rollback):
            raise CacheMisuse(
                "an earlier forward pass was cut short and left this cache unusable; reset() it or make a new one."
            )
        if self.backend.is_dirty and not (self.seen or self.backend.has_history):
            return self.reset()
        self.backend.rollback()
        self.in_forward = False

    def _commit(self, call: AttentionCall) -> None:
        """After the last compressed layer: count the tokens of this forward pass."""
        if self.pass_end.settles_later:
            self.attention_check.send()
        else:
            self.check()
        self.backend.commit()
        if not self.pass_end.settles_later:
            self.backend.settle()
        guesses = self.layout if self.pass_end.verifies else self.layout.guesses
        self.croppable, q = guesses.counts[0] if guesses else 0, call.query.shape[2]
        if q > self.croppable:
            known = call.split(self.croppable)[0] if self.croppable else call
            self.tracker.commit(self.layout, known.query.shape[2], known.padding)
        self.tracker.append_decoded(self.croppable)
        if self.method.needs_passes:
            self.unreplayed = self.unreplayed.begin(self.layout)
        self.layout, self.in_forward = IDLE, False

    def check(self) -> None:
        """Wait for the device after a forward pass that did not, and raise what is wrong with input or model."""
        try:
            self.attention_check.raise_if_failed()
        except KvkeepError:
            if not self.seen:
                self.reset()
            raise

    def settle(self) -> None:
        """The same, and store what is kept, before anything else uses the cache."""
        self.check()
        self.backend.settle()

    def note_text(self, ids: Tensor | None, positions: Tensor | None) -> None:
        """After a forward pass: its tokens, if the model runs again after them."""
        if self.unreplayed.layout and ids is not None:
            self.unreplayed = self.unreplayed.add(ids, positions, self.seen)

    def after_forward(self, ids: Tensor | None, positions: Tensor | None) -> None:
        """Run the model again after a prompt that is prefilled to the end, then evict from all layers."""
        self.note_text(ids, positions)
        run_passes([self])

    def before_forward(self) -> None:
        """The same, where it was cut short after that prefill, or while it waited."""
        if self.unreplayed.due:
            self.pass_end = replace(self.pass_end, passes_later=False)
            run_passes([self])

    def evict_held(self, scores: LayerRows, queries: LayerRows) -> None:
        """Evict from a prompt after which the model ran again: by what was found of its layers and rows."""
        backend, due = self.backend, self.unreplayed.due
        assert isinstance(backend, EvictingBackend) and due
        selected = backend.select(self.method, self.tracker.seen, due, scores, queries)
        self.tracker.count_evicted(due)
        self.unreplayed, backend.selected = Unreplayed(), selected  # from here on, cut short, it is done when needed
        backend.evict_selected()

    def reset(self) -> None:
        """Empty the cache."""
        self.layers = self.new_layers()
        self._init_state()

    def kept(self, layer: int) -> list[list[list[int]]]:
        """Token positions of the kept tokens, `[row][KV head]`: ascending, padding not counted."""
        if not isinstance(layer, int) or layer not in self.compressed_layers:
            raise CacheMisuse(f"layer {layer!r} is not compressed; the compressed ones are {self.compressed_layers}.")
        return [[head.tolist() for head in row] for row in self.backend.positions(layer)]

    def show(self, tokenizer: Any, ids: Sequence[int] | Tensor, row: int = 0) -> ShadedText:
        """The text, shaded by how many heads hold each token, for a notebook. ids: the row's tokens, without padding

        A cache holds keys and values, not the tokens they are of: give those that `generate` returned.
        """
        rows = len(self.tracker.seen)
        if isinstance(row, bool) or not isinstance(row, int) or not -rows <= row < rows:
            raise CacheMisuse(f"row={row!r}: this cache has {rows} rows, counted from 0; show it after a forward pass.")
        check_tokenizer(tokenizer)
        flat = ids.flatten() if isinstance(ids, Tensor) else ids
        known = check_ids(self.model, flat, "ids").tolist()[: self.tracker.seen[row]]
        layers = [self.kept(layer)[row] for layer in self.compressed_layers]
        return ShadedText.of(repr(self), token_texts(tokenizer, known), layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of the compressed layers, measured on their storages, with scales and mins."""
        return self.backend.nbytes

    @property
    def longest_head(self) -> int:
        """Tokens of the fullest KV head."""
        heads = (head for i in self.compressed_layers for row in self.backend.positions(i) for head in row)
        return max(map(len, heads), default=0)

    def report(self) -> Report:
        """What the cache holds, and what a full cache would hold."""
        report = self.backend.report(self.tracker.seen)
        layers = [self.backend.positions(i) for i in self.compressed_layers] if self.tracker.has_parts else []
        return replace(report, kept=kept_by_part(self.tracker.parts, report.kept_per_head, layers))

    def __repr__(self) -> str:
        report, name = self.report(), type(self).__name__
        tokens = f"{sum(self.tracker.seen):,} tokens seen, {format_kept(report.kept)} kept per KV head"
        offloaded = f", {format_bytes(report.host_bytes)} offloaded" if report.host_bytes else ""
        size = f"{format_bytes(report.bytes)}{offloaded}"
        return f"<kvkeep.{name} {self.method.name}, budget {self.budget}: {tokens}, {size}>"

    def fork(self) -> Cache:
        """An independent copy: one compressed context, many questions."""
        self._rollback()
        fork = type(self).__new__(type(self))
        fork.__dict__.update(self.__dict__)  # what was checked of the model holds for both, and blocks count once
        fork.counts_guesses = False
        fork.reset()
        fork.copy_hf_layers(self)
        fork.tracker, fork.backend, fork.unreplayed = copy.copy(self.tracker), self.backend.fork(), self.unreplayed
        return fork

    def continue_from(self, history: History, ids: Sequence[int], observe_from: int = 0) -> None:
        """Begin after the tokens of a history, which gets those of this cache.

        ids: of all its tokens; observe_from: a position: methods that sum over a prompt's queries begin there
        """
        backend, tracker, seen = self.backend, self.tracker, history.tokens
        assert isinstance(backend, EvictingBackend) and not tracker.seen and not self.hf_layers and len(ids) == seen
        tracker.seen, tracker.kept, tracker.prompt, tracker.padded_length = [seen], [seen], [seen], seen
        backend.history, backend.query_buffer.observe_from = history, observe_from
        if self.method.needs_passes and seen:
            self.unreplayed = Unreplayed([RowText(list(ids), seen)])

    def defer_eviction(self, tokens: int) -> None:
        """Keep all tokens until so many have been seen: a prompt prefilled in chunks is then evicted from at once."""
        self.tracker.deferred_until = tokens

    def append_decoded(self, count: int) -> None:
        """Count tokens that were decoded elsewhere; the backend has what is kept of them, or will have it."""
        self._rollback()
        if isinstance(self.backend, EvictingBackend):
            self.backend.query_buffer.begin([1])  # as a decode step
        self.tracker.append_decoded(count)

    def share_host_budget(self, host_budget: HostMemoryBudget) -> None:
        """Count offloaded tokens against the same limit as other caches. Before the first forward pass."""
        self.host_budget = host_budget
        self.backend = self._new_backend()

    def __deepcopy__(self, memo: dict) -> Cache:
        return self.fork()

    def __reduce__(self) -> Any:
        raise CacheMisuse(
            "a cache cannot be pickled: it would drag the model along; use save(path) and Cache.load(path, model)."
        )

    def save(self, path: str | Path) -> None:
        """Save this cache to a folder; the model is not part of it."""
        self.unreplayed.check_done(self.method.name)
        if self.shards:
            raise CacheMisuse(
                f"tensor parallelism splits this cache over {self.shards.size} processes, and a saved one has all "
                "heads; load the model with device_map='auto' to save caches."
            )
        serialize.save(self, path)

    @classmethod
    def load(cls, path: str | Path, model: Any, tokenizer: Any = None) -> Cache:
        """Load a cache that was saved with the same model."""
        cache = serialize.load(cls, path, model)
        cache.tokenizer = tokenizer
        return cache

    def _select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed."""
        if not self.tracker.seen:
            return
        self.unreplayed.check_done(self.method.name)
        self.backend.select_rows(rows)
        self.tracker.select_rows(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._call_hf_layers("reorder_cache", beam_idx)
        self._select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self._call_hf_layers("batch_select_indices", indices)
        self._select_rows(torch.arange(len(self.tracker.seen))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._call_hf_layers("batch_repeat_interleave", repeats)
        self._select_rows([row for row in range(len(self.tracker.seen)) for _ in range(repeats)])

    def _call_hf_layers(self, name: str, argument: Any) -> None:
        self._rollback()
        for layer in self.hf_layers:
            getattr(layer, name)(argument)

    def activate_past_recording(self) -> None:
        """transformers calls this before assisted generation: from now on guesses are told apart, and taken back."""
        if reason := self.method.cannot_guess:
            raise CacheMisuse(
                "assisted generation and prompt lookup (assistant_model=, prompt_lookup_num_tokens=) cannot work with "
                f"'{self.method.name}': {reason}"
            )
        if self.seen:
            raise CacheMisuse(
                f"assisted generation reads the whole prompt again, but this cache has seen {self.seen} tokens; make a "
                "new one, or leave assistant_model= and prompt_lookup_num_tokens= out."
            )
        if not self.counts_guesses:
            count_guesses(self)
            self.counts_guesses = True
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """transformers calls this after every forward pass of assisted generation. -n: take back the last n guesses"""
        try:
            count = -int(tokens_to_remove)
        except (OverflowError, TypeError, ValueError):
            count = -1
        if not self.counts_guesses or not 0 <= count <= self.croppable:
            raise CacheMisuse(
                f"crop({tokens_to_remove!r}): a compressed cache cannot be cropped but for guesses of assisted "
                "generation: evicted tokens are not restored; fork() it before you add."
            )
        self._call_hf_layers("crop", -count)
        self._take_back(count)

    def accept(self, count: int) -> None:
        """After a forward pass that verified guesses: keep the first of them, and take the others back."""
        self._take_back(self.croppable - count)

    def _take_back(self, count: int) -> None:
        assert isinstance(self.backend, EvictingBackend)  # no other is given guesses
        self.backend.crop(count)
        self.tracker.append_decoded(-count)
        self.croppable = 0
