"""Rows that evict one token of every KV head for each new one, decoded one token at a time.

A layer writes the new token of every row into its free slot and attends; after a block of layers, the method's rule
(compress/step_rule.py) says which token of each KV head leaves. Rows that are not full only append. Nothing waits for
the host, so that a decode step of all rows can be captured in a CUDA graph and replayed. The rows are those of one
cache (cache_steps.py), or of all requests of one method and budget (step_pool.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.decode.runner import DecodeRows
from kvkeep.compress.step_rule import StepRule
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.storage.ragged import GROWTH, LayerKind, RaggedLayer
from kvkeep.storage.rows import restored
from kvkeep.storage.step_block import StepBlock, StepShape, runs
from kvkeep.types import NOTHING, Step

BLOCK_LAYERS = {"cuda": 8, "cpu": 64}  # evicted from together: in few kernels, and their logits take little memory


class EvictOne:
    """The rows of all layers, in blocks of layers that are evicted from together."""

    def __init__(
        self,
        rule: StepRule,
        kinds: dict[int, LayerKind],
        heads: int,
        rotations: Mapping[int, Rotation | None],
        rows: int,
        slots: int | None = None,
    ) -> None:
        """kinds: of every layer; slots: of a KV head, None: as many as a full one has

        A rule that evicts nothing in steps only keeps token state up to date.
        """
        self.rule, self.rows, self.full = rule, rows, rule.tokens + 1 if rule.evicts else sys.maxsize
        self.calls: list[AttentionCall] = []  # of the block's layers so far
        self.changed: list[StepBlock] = []  # by the pass under way
        moved: dict[Any, Any] = {}  # one rotation for all layers that share it
        self.rotations = {
            i: each and moved.setdefault((id(each), kinds[i].device), each.to(kinds[i].device))
            for i, each in rotations.items()
        }
        layers, slots = list(kinds), slots or self.full
        size = BLOCK_LAYERS.get(kinds[layers[0]].device.type, 8)
        self.blocks = [
            StepBlock(self._shape(same, kinds[same[0]], heads, slots), rows)
            for first in range(0, len(layers), size)
            for same in runs(layers[first : first + size], kinds.__getitem__)
        ]
        self.block_of = {i: (block, number) for block in self.blocks for number, i in enumerate(block.shape.layers)}

    def _shape(self, layers: Sequence[int], kind: LayerKind, heads: int, slots: int) -> StepShape:
        rule, placed = self.rule, self.rule.method.placement is not None
        width = rule.memory.width if rule.memory else 0
        return StepShape(layers, kind, heads, slots, self.full, width, placed, rule.moved_sinks, rule.needs_attention)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def is_writable(self) -> bool:
        """Tensors made in inference mode cannot be changed outside of it."""
        return torch.is_inference_mode_enabled() or not self.blocks[0].rows.lengths.is_inference()

    def grow(self, rows: int, slots: int) -> None:
        self.rows = rows
        for block in self.blocks:
            block.grow(rows, slots)

    def reserve(self, held: int) -> None:
        """Make room for so many tokens of every KV head, and a 64th more, but no more than a full one has."""
        if self.blocks[0].shape.slots < min(held, self.full):
            self.grow(self.rows, min(held + held // GROWTH, self.full))

    def put(self, row: int, store: Mapping[int, RaggedLayer], length: int, source: int) -> None:
        """Copy one row of a cache that has seen so many tokens."""
        for block in self.blocks:
            block.put(row, [store[i] for i in block.shape.layers], length, source)

    def fill(self, store: Mapping[int, RaggedLayer], rows: Mapping[int, int]) -> None:
        """Fill a cache's layers with what rows hold. rows: of each, the tokens that it came with, and all since"""
        for block in self.blocks:
            kept = [block.take(row, min(held, self.full - 1)) for row, held in rows.items()]
            for index, *heads in zip(block.shape.layers, *kept, strict=True):
                store[index].fill(heads)

    def undo(self, rows: slice, blocks: Sequence[StepBlock]) -> None:
        """Take the last step of some rows back in these layers."""
        for block in blocks:
            block.undo(rows)
            if block.shape.sinks:
                self._move_sinks(block, rows)

    @contextmanager
    def no_row_in_use(self) -> Iterator[None]:
        """Within, steps write to free slots alone; what else they change is restored."""
        with restored([part for block in self.blocks for part in block.changed]):
            for block in self.blocks:
                block.rows.active.zero_()
            yield

    # one step of the first rows

    def begin(self) -> None:
        self.calls, self.changed = [], []

    def rollback(self) -> None:
        """Undo a step that was cut short."""
        with torch.inference_mode(torch.is_inference_mode_enabled() or not self.is_writable):
            self.undo(slice(None), self.changed)
        self.begin()

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """One token for each of the first rows; those not in use write to a slot of their own."""
        rows, (block, number) = len(call.query), self.block_of[index]
        key, value = call.key.detach(), call.value.detach()
        output = block.attend(number, rows, call.query, key, value, *call.how)
        self.calls.append(call)
        if index == block.shape.layers[-1]:
            calls, self.calls = self.calls, []
            self._evict(block, calls, rows)
        return call.to_hf_output(output)

    @torch.no_grad()
    def _evict(self, block: StepBlock, calls: Sequence[AttentionCall], rows: int) -> None:
        """One token of every KV head that is full, in layers of one kind at once."""
        block.remember(rows)
        self.changed.append(block)
        kinds = [(call.scale, call.softcap, call.sink_logits is None) for call in calls]
        for first, *rest in runs(range(len(calls)), kinds.__getitem__):
            layers = slice(first, first + 1 + len(rest))
            step = self.rule.update_token_state(self._step(block, layers, calls[layers], rows))
            block.evict(rows, layers, self.rule.lowest_scored(step) if self.rule.evicts else None, step.token_state)
        block.advance(rows)
        if block.shape.sinks:
            self._move_sinks(block, slice(rows))

    def _step(self, block: StepBlock, layers: slice, calls: Sequence[AttentionCall], rows: int) -> Step:
        """Insert the new tokens. -> the layers as further rows"""

        def flat(part: Tensor) -> Tensor:
            return part if part is NOTHING else part[:rows, layers].flatten(0, 1)

        block.insert(rows, layers)
        stored = flat(block.rows.token_positions), flat(block.rows.token_state), flat(block.rows.free_slot)
        lengths = block.rows.lengths[:rows].repeat_interleave(len(calls))
        value = torch.stack([call.value[:, :, 0] for call in calls], 1)
        how = calls[0].scale, calls[0].softcap, _sink_logits(calls, block.shape.kind.kv_heads, rows)
        return Step(*stored, flat(block.logits), value.flatten(0, 1), lengths + 1, *how)

    def _move_sinks(self, block: StepBlock, rows: slice) -> None:
        """To their positions for the next token, in rows that have evicted."""
        lengths, admitted = block.rows.lengths[rows], block.rows.sink_positions[rows]
        evicted = (lengths > self.rule.tokens)[:, None]
        target = torch.where(evicted, self.rule.sink_positions(lengths), admitted)
        block.move_sinks(rows, target, [self.rotations[i] for i in block.shape.layers])


class EvictOneRows(DecodeRows):
    """What the model sees of such rows."""

    def __init__(self, model: Any, steps: EvictOne) -> None:
        super().__init__(model)
        self.steps = steps

    def graph_capture_scratch(self) -> AbstractContextManager[None]:
        return self.steps.no_row_in_use()

    def begin_forward(self) -> None:
        self.steps.begin()

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return self.steps.attend(index, call)


def _sink_logits(calls: Sequence[AttentionCall], kv_heads: int, rows: int) -> Tensor | None:
    """[rows * layers, kv_heads, group]"""
    each = [call.sink_logits for call in calls if call.sink_logits is not None]
    return torch.stack(each).unflatten(1, (kv_heads, -1)).repeat(rows, 1, 1) if each else None
