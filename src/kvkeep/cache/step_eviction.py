"""One token in, one token out: a decode step over a full cache, in place, for all rows and layers at once.

A layer only writes the new token into its free slot and attends; what is evicted is decided after the last layer, for
layers of one kind in one batch (storage/inplace.py). So a forward pass that is cut short has changed nothing. Only for
methods whose scorer has `step`, with equal heads and layers; others evict as after a prefill (evictor.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache.padding import BatchLayout
from kvkeep.compress.budget.heads import EqualHeads
from kvkeep.compress.budget.layers import EqualLayers
from kvkeep.compress.method import Method
from kvkeep.compress.positions import PlacementInput
from kvkeep.compress.protocols import Placement, ScorerTraits, StepMemory, StepScorer
from kvkeep.kernels.torch.reference import decode_attention_with_probs, dense_attention
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.rope import Rotation
from kvkeep.storage.inplace import InplaceBatch
from kvkeep.storage.ragged import RaggedLayer
from kvkeep.types import NOTHING, PAD_POSITION, Budget, Step


@dataclass(frozen=True)
class LayerStep:
    """What one layer's decode step leaves for the eviction after the last layer."""

    layer: RaggedLayer
    logits: Tensor
    probs: Tensor
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
    method: Method
    budget: Budget
    rotations: dict[int, Rotation | None]
    context_length: int
    in_place: bool = True

    def __post_init__(self) -> None:
        method, budget = self.method, self.budget.value
        self.tokens = budget if self.in_place and isinstance(budget, int) else 0  # 0: nothing, or a fraction
        self.memory = method.memory if self.tokens and isinstance(method.memory, StepMemory) else None
        # token state is made of attention, even where the scorer itself needs none
        self.needs_attention = method.memory is not None or ScorerTraits.of(method.scorer).needs_attention
        one_by_one = method.group is None and method.reuse == 1 and (method.memory is None or self.memory)
        equal = isinstance(method.heads, EqualHeads) and isinstance(method.layers, EqualLayers)
        supported = self.tokens and one_by_one and equal
        self.scorer = method.scorer if supported and isinstance(method.scorer, StepScorer) else None
        self.layer_steps: list[LayerStep] = []
        self.batches: dict[tuple, tuple[InplaceBatch, SinkKeys | None]] = {}

    def can_evict_one(self, layer: RaggedLayer, layout: BatchLayout) -> bool:
        """Every row gets one token, and all of them are exactly full."""
        full = layer.is_uniform and layer.lengths[0] == self.tokens
        return self.scorer is not None and layout.is_step and all(layout.evict_now) and full

    def can_append(self, layer: RaggedLayer, layout: BatchLayout) -> bool:
        """Nothing is evicted for the new tokens, but token state has to be updated with their attention."""
        appends = layout.is_step and not any(layout.evict_now)
        return self.memory is not None and appends and layer.is_uniform

    def begin(self, layout: BatchLayout) -> None:
        """What all layers of a forward pass share: each row's length, and the positions of its sinks."""
        self.clear()
        self.positions = torch.cat(layout.positions)
        self.lengths = [before + 1 for before in layout.seen]
        moves = self.scorer and min(layout.seen) >= self.tokens and self.method.guard.sinks
        self.rope_positions = self._sink_positions(self.method.placement) if moves and self.method.placement else None

    def _sink_positions(self, placement: Placement) -> Tensor | None:
        """Positions of every row's sinks among the tokens kept after this step; None where they never move.

        [rows, sinks]
        """
        sinks, late, rows = self.method.guard.sinks, self.tokens - self.method.guard.sinks, []
        for length in self.lengths:
            kept = torch.cat([torch.arange(sinks), torch.arange(length - late, length)])
            rows.append(placement(PlacementInput(kept, length, self.tokens, self.context_length))[:sinks])
        rope_positions = torch.stack(rows)
        return None if bool((rope_positions == torch.arange(sinks)).all()) else rope_positions.to(torch.int32)

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
        logits = probs = NOTHING
        how = (call.query, keys, values, call.scale, call.softcap, call.sink_logits)
        if self.needs_attention:
            output, *observed = decode_attention_with_probs(*how)
            logits, probs = (each.detach() for each in observed)
        else:
            output = dense_attention(*how)
        value, rotation = call.value[:, :, 0].detach(), self.rotations.get(index)
        self.layer_steps.append(LayerStep(layer, logits, probs, value, *how[3:], rotation, evicts))
        return output

    @torch.no_grad()
    def commit(self) -> None:
        """After the last layer: update token state, and evict one token per key head where layers were full."""
        kinds = defaultdict(list)
        for one in self.layer_steps:
            kinds[one.kind].append(one)
        for kind, alike in kinds.items():
            if self.scorer and alike[0].evicts:
                self._evict_one(kind, alike, self.scorer)
            elif self.memory:
                self._update_token_state(alike, self.memory)
        self.clear()

    def clear(self) -> None:
        """Drop the layers' steps of a forward pass that ended, completed or not."""
        self.layer_steps = []

    def _update_token_state(self, alike: Sequence[LayerStep], memory: StepMemory) -> None:
        names = "token_positions", "token_state"
        each = [[one.layer.uniform_view(one.layer.flat.parts[name]) for name in names] for one in alike]
        positions, token_state = (torch.cat(parts) for parts in zip(*each, strict=True))
        newest = torch.full(positions.shape[:2], positions.shape[2] - 1, device=positions.device)
        updated = memory.step(self._step(alike, positions, token_state, newest), self.tokens)
        for (_, mine), new in zip(each, updated.chunk(len(alike)), strict=True):
            mine.copy_(new)

    def _evict_one(self, kind: tuple, alike: Sequence[LayerStep], scorer: StepScorer) -> None:
        batch, sinks = self.batches.get(kind, (None, None))
        if batch is None or not batch.is_valid or len(batch.layers) != len(alike):
            batch = InplaceBatch([one.layer for one in alike])
            sinks = None
        batch.insert(self.positions.to(batch.token_positions.device))
        step = self._step(alike, batch.token_positions, batch.token_state, batch.free_slot)
        if self.memory:
            step = replace(step, token_state=self.memory.step(step, self.tokens))
        batch.evict(self._lowest_scored(step, scorer), step.token_state)
        if self.rope_positions is not None and batch.rope_positions is not None:
            sinks = sinks or self._sink_keys(batch, batch.rope_positions)
            self._move_sinks(batch, sinks, self.rope_positions.to(batch.rope_positions.device), alike[0].rotation)
        self.batches[kind] = batch, sinks

    def _step(self, alike: Sequence[LayerStep], positions: Tensor, token_state: Tensor, newest: Tensor) -> Step:
        """Layers of one kind as one batch."""
        logits, probs = torch.cat([one.logits for one in alike]), torch.cat([one.probs for one in alike])
        value = torch.cat([one.value for one in alike])
        each = [one.sink_logits.view(1, one.layer.kv_heads, -1) for one in alike if one.sink_logits is not None]
        sink_logits = torch.cat([one.expand(len(self.lengths), -1, -1) for one in each]) if each else None
        lengths, how = self.lengths * len(alike), (alike[0].scale, alike[0].softcap, sink_logits)
        return Step(positions, token_state, newest, logits, probs, value, lengths, *how)

    def _lowest_scored(self, step: Step, scorer: StepScorer) -> Tensor:
        """The slot of each key head's token to evict; of equal scores, the earliest. [rows, kv_heads]"""
        scores = scorer.step(step, self.tokens).float()
        scores = scores.masked_fill(self.method.guard.step(step, self.tokens), float("inf"))
        lowest = scores <= scores.amin(-1, keepdim=True)
        return torch.where(lowest, step.token_positions, PAD_POSITION).argmin(-1)

    def _sink_keys(self, batch: InplaceBatch, rope_positions: Tensor) -> SinkKeys:
        n, rows = self.method.guard.sinks, batch.layers[0].rows
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
