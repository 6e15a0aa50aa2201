"""One token in, one token out: a decode step over a full cache, in place, for all rows and layers at once.

A layer only writes the new token into its free slot and attends; what is evicted is decided after the last layer, for
layers of one kind in one batch (storage/inplace.py), by a rule (compress/step_rule.py). So a forward pass that is cut
short has changed nothing. Methods that the rule does not support evict as after a prefill (evictor.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.padding import BatchLayout
from kvkeep.compress.step_rule import StepRule
from kvkeep.kernels.torch.reference import decode_attention_with_logits, dense_attention
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.storage.inplace import InplaceBatch
from kvkeep.storage.ragged import RaggedLayer
from kvkeep.types import NOTHING, Step


@dataclass(frozen=True)
class LayerStep:
    """What one layer's decode step leaves for the eviction after the last layer."""

    layer: RaggedLayer
    logits: Tensor
    value: Tensor  # [rows, kv_heads, dim]
    scale: float
    softcap: float | None
    sink_logits: Tensor | None  # [heads]
    rotation: Rotation | None
    evicts: bool  # the layer was full: one token has to go

    @property
    def kind(self) -> tuple:
        """Layers of one kind are evicted from in one batch."""
        like, size = self.layer.flat.token_positions, self.layer.token_nbytes
        how = self.scale, self.softcap, self.sink_logits is None, id(self.rotation)
        return self.evicts, like.device, self.layer.kv_heads, like.shape, size, *how


@dataclass
class SinkKeys:
    """The sinks' keys as first stored, and their positions then: rotated from there, no rounding error builds up."""

    keys: Tensor  # [layers, rows, kv_heads, sinks, dim]
    rope_positions: Tensor  # [rows, sinks]
    stored: Tensor  # [rows, kv_heads, sinks] the batch's own positions of them


@dataclass
class StepEvictor:
    rule: StepRule
    rotations: dict[int, Rotation | None]

    def __post_init__(self) -> None:
        self.layer_steps: list[LayerStep] = []
        self.batches: dict[tuple, tuple[InplaceBatch, SinkKeys | None]] = {}

    def can_evict_one(self, layer: RaggedLayer, layout: BatchLayout) -> bool:
        """Every row gets one token, and all of them are exactly full."""
        full = layer.is_uniform and layer.lengths[0] == self.rule.tokens
        return self.rule.scorer is not None and layout.is_step and all(layout.evict_now) and full

    def can_append(self, layer: RaggedLayer, layout: BatchLayout) -> bool:
        """Nothing is evicted for the new tokens, but token state has to be updated with their attention."""
        appends = layout.is_step and not any(layout.evict_now)
        return self.rule.memory is not None and appends and layer.is_uniform

    def begin(self, layout: BatchLayout) -> None:
        """What all layers of a forward pass share: each row's length, and the positions of its sinks."""
        self.clear()
        self.positions = torch.cat(layout.positions)
        self.rope_positions = None
        if self.rule.moved_sinks and min(layout.seen) >= self.rule.tokens:
            rope_positions = self.rule.sink_positions(torch.tensor(layout.seen) + 1)
            moved = bool((rope_positions != torch.arange(self.rule.moved_sinks)).any())
            self.rope_positions = rope_positions if moved else None

    def append_and_attend(self, index: int, layer: RaggedLayer, call: AttentionCall, layout: BatchLayout) -> Tensor:
        """-> attention's output [rows, heads, 1, dim]"""
        layer.append(call.key.detach(), call.value.detach(), layout.positions, None)
        tokens = layer.uniform()
        return self._attend(index, layer, call, tokens.keys, tokens.values, evicts=False)

    def insert_and_attend(self, index: int, layer: RaggedLayer, call: AttentionCall) -> Tensor:
        """Attend over one token more than the budget. -> attention's output [rows, heads, 1, dim]"""
        keys, values = layer.write_free_slot(call.key[:, :, 0].detach(), call.value[:, :, 0].detach())
        return self._attend(index, layer, call, keys, values, evicts=True)

    def _attend(
        self, index: int, layer: RaggedLayer, call: AttentionCall, keys: Tensor, values: Tensor, evicts: bool
    ) -> Tensor:
        logits, how = NOTHING, (call.query, keys, values, *call.how)
        if self.rule.needs_attention:
            output, logits = decode_attention_with_logits(*how)
        else:
            output = dense_attention(*how)
        value, rotation = call.value[:, :, 0].detach(), self.rotations.get(index)
        self.layer_steps.append(LayerStep(layer, logits.detach(), value, *how[3:], rotation, evicts))
        return output

    @torch.no_grad()
    def commit(self) -> None:
        """After the last layer: update token state, and evict one token per key head where layers were full."""
        kinds = defaultdict(list)
        for one in self.layer_steps:
            kinds[one.kind].append(one)
        for kind, alike in kinds.items():
            if alike[0].evicts:
                self._evict_one(kind, alike)
            elif self.rule.memory:
                self._update_token_state(alike)
        self.clear()

    def clear(self) -> None:
        """Drop the layers' steps of a forward pass that ended, completed or not."""
        self.layer_steps = []

    def _update_token_state(self, alike: Sequence[LayerStep]) -> None:
        names = "token_positions", "token_state"
        each = [[one.layer.uniform_view(one.layer.flat.parts[name]) for name in names] for one in alike]
        positions, token_state = (torch.cat(parts) for parts in zip(*each, strict=True))
        newest = torch.full(positions.shape[:2], positions.shape[2] - 1, device=positions.device)
        step = self.rule.update_token_state(self._step(alike, positions, token_state, newest))
        for (_, mine), new in zip(each, step.token_state.chunk(len(alike)), strict=True):
            mine.copy_(new)

    def _evict_one(self, kind: tuple, alike: Sequence[LayerStep]) -> None:
        batch, sinks = self.batches.get(kind, (None, None))
        if batch is None or not batch.is_valid or len(batch.layers) != len(alike):
            batch = InplaceBatch([one.layer for one in alike])
            sinks = None
        batch.insert(self.positions.to(batch.token_positions.device).repeat(len(alike)))
        step = self._step(alike, batch.token_positions, batch.token_state, batch.free_slot)
        step = self.rule.update_token_state(step)
        batch.evict(self.rule.lowest_scored(step), step.token_state)
        if self.rope_positions is not None and batch.rope_positions is not None:
            sinks = sinks or self._sink_keys(batch, batch.rope_positions)
            self._move_sinks(batch, sinks, self.rope_positions.to(batch.rope_positions.device), alike[0].rotation)
        self.batches[kind] = batch, sinks

    def _step(self, alike: Sequence[LayerStep], positions: Tensor, token_state: Tensor, newest: Tensor) -> Step:
        """Layers of one kind as one batch."""
        logits, value = torch.cat([one.logits for one in alike]), torch.cat([one.value for one in alike])
        each = [one.sink_logits.view(1, one.layer.kv_heads, -1) for one in alike if one.sink_logits is not None]
        sink_logits = torch.cat([one.expand(len(self.positions), -1, -1) for one in each]) if each else None
        lengths = (self.positions.to(positions.device) + 1).repeat(len(alike))
        how = alike[0].scale, alike[0].softcap, sink_logits
        return Step(positions, token_state, newest, logits, value, lengths, *how)

    def _sink_keys(self, batch: InplaceBatch, rope_positions: Tensor) -> SinkKeys:
        n, rows = self.rule.moved_sinks, batch.layers[0].rows
        keys = torch.stack([_sink_view(layer, n) for layer in batch.layers])
        return SinkKeys(keys, rope_positions[:rows, 0, :n].clone(), rope_positions[:, :, :n])

    def _move_sinks(self, batch: InplaceBatch, sinks: SinkKeys, target: Tensor, rotation: Rotation | None) -> None:
        """Rotate the sinks' keys to their positions for the next token."""
        if rotation is not None:
            rotated = rotation.rotate(sinks.keys, (target - sinks.rope_positions)[:, None])
            for layer, keys in zip(batch.layers, rotated, strict=True):
                _sink_view(layer, target.shape[1]).copy_(keys)
        sinks.stored[:] = target.repeat(len(batch.layers), 1)[:, None]


def _sink_view(layer: RaggedLayer, n: int) -> Tensor:
    """The keys of a full layer's sinks: never evicted, so they lie first. [rows, kv_heads, n, dim]"""
    return layer.flat.keys.unflatten(0, (layer.rows, layer.kv_heads, -1))[:, :, :n]
