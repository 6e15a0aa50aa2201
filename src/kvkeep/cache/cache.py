"""A transformers Cache that keeps, per row, layer and key head, only the tokens its method selects.

After every prefill (a forward pass of more than one token), each row's kept and new tokens are evicted down to the
budget, scored by the row's newest queries. Decode steps append, and evict when the schedule says so. So a long prompt
prefilled in chunks never holds more than budget + chunk tokens, and every turn of a conversation ends its prefill
within the budget. (Longer than most files: it is the one class that implements transformers' whole cache interface.)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import serialize
from kvkeep.cache.eviction import Evictor
from kvkeep.cache.padding import BatchLayout, PaddingTracker
from kvkeep.cache.query_buffer import QueryBuffer
from kvkeep.cache.report import Report, format_bytes, format_kept, kept_by_part
from kvkeep.cache.retrieval import RetrievalBackend
from kvkeep.cache.self_check import AttentionCheck
from kvkeep.cache.step_eviction import StepEvictor
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse
from kvkeep.compress.schedule import Schedule, as_schedule
from kvkeep.errors import BadParameter, CacheMisuse, KvkeepError
from kvkeep.kernels.torch.reference import segment_attention
from kvkeep.model.hf_attention import AttentionCall, attend_with_lse
from kvkeep.model.hf_cache import CompressedLayer, HFCacheAdapter, context_length, key_shape
from kvkeep.model.hf_layers import UsageTrackedLayer, has_seen
from kvkeep.model.rope import rotations
from kvkeep.storage.offload.disk import DiskStore
from kvkeep.storage.offload.host import HostMemoryBudget
from kvkeep.storage.ragged import LayerSnapshot, RaggedLayer


class Cache(HFCacheAdapter):
    """Pass as `past_key_values` to a model's forward or generate."""

    def __init__(
        self,
        model: Any,
        method: str | Method = "kvkeep",
        budget: int | float | None = None,
        *,
        schedule: str | int | Schedule | None = None,
        host_limit: int | None = None,
        disk: str | Path | None = None,
        storage: str | None = None,
        **parameters: Any,
    ):
        """host_limit: bytes of host memory for offloaded tokens; disk: a folder for what exceeds them.

        storage: "int8" or "int4" quantizes every group of 32 tokens once it is complete; None: the model's dtype.
        Tokens are quantized once, and again whenever an eviction regroups them.
        """
        self.method = parse(method, **parameters)
        if schedule is not None:
            self.method = replace(self.method, schedule=as_schedule(schedule))
        self.budget = self.method.check(budget)
        super().__init__(model)
        self.storage, self.bits = storage, self.method.bits(storage)
        if self.bits == 4 and (size := key_shape(self.model)[1]) % 2:
            raise BadParameter(f"storage='int4' halves keys, but those of {self.name} have {size} numbers; use 'int8'.")
        moves = self.method.placement or (self.method.retrieval and self.method.retrieval.moves_keys)
        self.rotations = rotations(self.model, self.compressed_layers) if moves else {}
        self.host_budget = HostMemoryBudget(host_limit, DiskStore(disk) if disk is not None else None)
        self.context_length = context_length(self.model)
        self._init_state()

    def _init_state(self) -> None:
        self.store = {i: RaggedLayer(self.bits) for i in self.compressed_layers}
        self.tracker = PaddingTracker(partial(self.method.tokens, self.budget), self.method.schedule)
        self.layout: BatchLayout | None = None  # of the current forward pass
        self.attention_check = AttentionCheck(self.name)
        self.peak_bytes = 0  # the most keys and values at once, as far as measured
        decoding = self.method.schedule.every is not None
        self.query_buffer = QueryBuffer(self.method, self.compressed_layers, decoding)
        self.step_evictor = StepEvictor(self.method, self.budget, self.rotations, self.context_length)
        # in a forward pass: the state of each layer before it, None where it cannot be restored
        self.layer_snapshots: dict[int, LayerSnapshot | None] | None = None
        self.evictor = Evictor(self.method, self.budget, self.store, self.rotations, self.context_length)
        self.retrieval: RetrievalBackend | None = None
        if self.method.retrieval:
            layers = self.compressed_layers
            self.retrieval = RetrievalBackend(self.method, self.budget, self.rotations, layers, self.host_budget)

    @property
    def seen(self) -> int:
        return self.tracker.padded_length

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """All that happens in one layer of one forward pass: append, attend, evict."""
        if index == self.compressed_layers[0]:
            self._begin(call)
        layout = self.layout.to(call.key.device)
        layer = self.store[index]
        self.layer_snapshots[index] = layer.snapshot()
        if self.retrieval:
            result = self.retrieval.attend(index, call, layout)
            self.attention_check.check(index, call, layout, layer)
        elif self.tracker.frozen:
            result = call.to_hf_output(self._attend_over_cache(layer, call, layout))
            self.attention_check.check(index, call, layout, layer)
        elif self.step_evictor.can_evict_one(layer, layout):
            result = call.to_hf_output(self.step_evictor.insert_and_attend(index, layer, call))
        elif self.step_evictor.can_append(layer, layout):
            result = call.to_hf_output(self.step_evictor.append_and_attend(index, layer, call, layout))
        else:
            result, lse = self._attend(layer, call, layout)
            self.attention_check.check(index, call, layout, layer)
            self._evict(index, call, layout, layer, lse)
        layer.quantize()
        if index == self.compressed_layers[-1]:
            self._commit(call)
        return result

    def _attend(
        self, layer: RaggedLayer, call: AttentionCall, layout: BatchLayout
    ) -> tuple[tuple[Tensor, Tensor | None], Tensor | None]:
        """The output of attention, and each query's log-sum-exp where the method uses it and the kernel returns it."""
        if layer:
            return call.to_hf_output(self._attend_over_cache(layer, call, layout)), None
        with_lse = attend_with_lse(call) if self.method.memory and self.method.memory.sees_all else None
        return with_lse or (call.hf_attention(), None)

    @torch.no_grad()  # kept tokens carry no graph; with learned sinks, scores would
    def _evict(
        self, index: int, call: AttentionCall, layout: BatchLayout, layer: RaggedLayer, lse: Tensor | None
    ) -> None:
        """Evict from the rows of `evict_now`; update the token state or the queries of the others."""
        if not layer or any(layout.evict_now) or self.method.memory:
            self.layer_snapshots[index] = None  # evicted tokens cannot be restored
            rows = self.query_buffer.observe(index, call, layout, self.tracker.seen, layer, lse)
            self.attention_check.check_nan(row.tokens.keys for row in rows)
            uncompressed = self.evictor.evict(index, rows)
            self.peak_bytes = max(self.peak_bytes, self.nbytes + uncompressed)
        else:
            self.query_buffer.append_step(index, call.query, layout)

    def begin_forward(self) -> None:
        self._rollback()
        self.layer_snapshots = {}
        for layer in self.hf_layers:
            if isinstance(layer, UsageTrackedLayer):
                layer.used = False

    def check_ready(self, layer: CompressedLayer) -> None:
        super().check_ready(layer)
        if self.layer_snapshots is None:  # the mask was not made through this cache
            self.layer_snapshots = {}

    def _begin(self, call: AttentionCall) -> None:
        """At the first compressed layer: tell the new tokens from padding."""
        if self.layer_snapshots:  # of a forward pass through a cache that wraps this one
            self._rollback()
        rows, _, q, _ = call.query.shape
        self.layout = self.tracker.next_layout(rows, q, call.padding, call.key.device)
        self.query_buffer.begin(self.layout.counts)
        if self.layout.is_step:
            self.step_evictor.begin(self.layout, self.tracker.seen)
        if self.retrieval:
            self.retrieval.begin()
        self.layer_snapshots = {}

    def _rollback(self) -> None:
        """Undo a forward pass that was cut short, if there was one; raise where that is impossible."""
        snapshots = self.layer_snapshots or {}
        in_step = all(has_seen(layer, self.seen, self.layer_snapshots is None) for layer in self.hf_layers)
        if not in_step or (self.seen and None in snapshots.values()):
            raise CacheMisuse(
                "an earlier forward pass was cut short and left this cache unusable; reset() it or make a new one."
            )
        if snapshots and not self.seen:
            return self.reset()
        for index, snapshot in snapshots.items():
            if self.store[index]:
                self.store[index].restore(snapshot)
        self.query_buffer.rollback()
        self.step_evictor.clear()
        self.evictor.clear()
        self.layer_snapshots = None

    def _attend_over_cache(self, layer: RaggedLayer, call: AttentionCall, layout: BatchLayout) -> Tensor:
        layer.append(call.key.detach(), call.value.detach(), layout.positions, layout.token_columns)
        if layer.is_quantized:
            return layer.quantized.attend(call.query, call.scale, call.softcap, call.sink_logits)
        output = segment_attention(
            layout.pack(call.query), layer.flat.keys, layer.flat.values, layer.segments, layout.counts,
            call.scale, call.softcap, call.sink_logits,
        )  # fmt: skip
        return layout.unpack(output)

    def _commit(self, call: AttentionCall) -> None:
        """After the last compressed layer: count the tokens of this forward pass."""
        try:
            self.attention_check.raise_if_failed()
        except KvkeepError:
            if not self.seen:
                self.reset()
            raise
        self.step_evictor.commit()
        if self.retrieval:
            self.retrieval.commit()
            self.peak_bytes = max(self.peak_bytes, self.nbytes)
        self.tracker.commit(self.layout, call.query.shape[2], call.padding)
        self.query_buffer.commit()
        self.layer_snapshots = self.layout = None
        self.evictor.clear()

    def reset(self) -> None:
        """Empty the cache."""
        self.layers = self.new_layers()
        self._init_state()

    def kept(self, layer: int) -> list[list[list[int]]]:
        """Token positions of the kept tokens: [row][key head] -> ascending, padding not counted."""
        if layer not in self.store:
            raise CacheMisuse(f"layer {layer} is not compressed; the compressed ones are {self.compressed_layers}.")
        if self.retrieval:
            return [state.positions() for state in self.retrieval.states.get(layer, [])]
        return [[head.tolist() for head in row] for row in self.store[layer].positions()]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of the compressed layers, measured on their storages, with scales and mins."""
        if self.retrieval:
            return sum(state.nbytes for rows in self.retrieval.states.values() for state in rows)
        return sum(layer.nbytes for layer in self.store.values())

    def report(self) -> Report:
        """What the cache holds, and what a full cache would hold."""
        facts = self.method.name, self.budget, self.tracker.seen
        if self.retrieval:
            report = Report.of_retrieval(*facts, self.retrieval.states, self.peak_bytes)
        else:
            layers = [self.store[i] for i in self.compressed_layers]
            report = Report.of(*facts, layers, self.query_buffer.nbytes, self.peak_bytes)
        positions = [self._positions(i) for i in self.compressed_layers] if self.tracker.has_parts else []
        return replace(report, kept=kept_by_part(self.tracker.parts, report.kept_per_head, positions))

    def _positions(self, layer: int) -> list[list[Tensor]]:
        """Token positions of the tokens a layer attends to: [row][key head] -> [n]"""
        if self.retrieval:
            return [[torch.tensor(head) for head in row] for row in self.kept(layer)]
        return self.store[layer].positions()

    def __repr__(self) -> str:
        report, name = self.report(), type(self).__name__
        tokens = f"{sum(self.tracker.seen):,} tokens seen, {format_kept(report.kept)} kept per key head"
        offloaded = f", {format_bytes(report.host_bytes)} offloaded" if report.host_bytes else ""
        size = f"{format_bytes(report.bytes)}{offloaded}"
        return f"<kvkeep.{name} {self.method.name}, budget {self.budget}: {tokens}, {size}>"

    def fork(self) -> Cache:
        """An independent copy: one compressed context, many questions."""
        self._rollback()
        fork = type(self)(self.model, self.method, self.budget, storage=self.storage)
        fork.copy_hf_layers(self)
        fork.store.update({i: layer.copy() for i, layer in self.store.items()})
        self.query_buffer.merge_steps()
        fork.query_buffer.queries = {key: queries.clone() for key, queries in self.query_buffer.queries.items()}
        if self.retrieval:
            fork.share_host_budget(self.host_budget)  # blocks both hold count once
            fork.retrieval.states = {i: list(rows) for i, rows in self.retrieval.states.items()}
            fork.retrieval.marks, fork.retrieval.question = list(self.retrieval.marks), dict(self.retrieval.question)
        fork.peak_bytes = self.peak_bytes
        fork.tracker, fork.attention_check.checked = copy.copy(self.tracker), set(self.attention_check.checked)
        return fork

    def share_host_budget(self, host_budget: HostMemoryBudget) -> None:
        """Count offloaded tokens against the same limit as other caches."""
        self.host_budget = host_budget
        if self.retrieval:
            self.retrieval.host_budget = host_budget

    def __deepcopy__(self, memo: dict) -> Cache:
        return self.fork()

    def __reduce__(self) -> Any:
        raise CacheMisuse(
            "a cache cannot be pickled: it would drag the model along; use save(path) and Cache.load(path, model)."
        )

    def save(self, path: str | Path) -> None:
        """Save this cache to a folder; the model is not part of it."""
        serialize.save(self, path)

    @classmethod
    def load(cls, path: str | Path, model: Any) -> Cache:
        """Load a cache that was saved with the same model."""
        return serialize.load(cls, path, model)

    def _select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed."""
        if not self.tracker.seen:
            return
        for layer in self.store.values():
            if layer:
                layer.select_rows(rows)
        self.query_buffer.select_rows(rows)
        if self.retrieval:
            self.retrieval.select_rows(rows)
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
        """transformers calls this before assisted generation, so that it can crop later."""
        raise CacheMisuse(
            "assisted generation and prompt lookup (assistant_model=, prompt_lookup_num_tokens=) remove tokens that "
            "were guessed wrongly, and a compressed cache cannot restore what it evicted for them; leave them out."
        )

    def crop(self, *_: Any, **__: Any) -> None:
        raise CacheMisuse(
            "a compressed cache cannot be cropped: evicted tokens are not restored; fork() it before you add."
        )
