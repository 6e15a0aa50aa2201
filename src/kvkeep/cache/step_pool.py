"""A preallocated pool for many sequences of one method and budget that evict one token for each new one.

A layer writes the new token of every row into its free slot and attends; after a block of layers, the method's rule
(compress/step_rule.py) says which token of each key head leaves. Rows that are not full only append. Nothing waits for
the host, so that a decode step of all rows can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.backend import CacheState
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.compress.step_rule import StepRule
from kvkeep.errors import CacheMisuse
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter, execution_device, key_shape, layer_devices, query_heads
from kvkeep.storage.step_block import StepBlock, StepShape, runs
from kvkeep.types import NOTHING, Step, Tokens

BLOCK_LAYERS = 8  # evicted from together: in few kernels, and their logits take little memory


def step_rule(cache: CacheState) -> StepRule | None:
    """If each decode step evicts one token of every key head of a full cache, and else appends: what is evicted."""
    backend = cache.backend
    if not isinstance(backend, EvictingBackend) or cache.method.schedule.every != 1 or cache.tracker.frozen:
        return None
    rule, held = backend.step_evictor.rule, {n for layer in backend.store.values() for n in layer.lengths}
    supported = rule.scorer and not (cache.hf_layers or cache.bits or backend.query_buffer.decoding)
    return rule if supported and len(held) == 1 and rule.moved_sinks <= min(held) <= rule.tokens else None


class StepPool(HFCacheAdapter):
    """A cache of many rows of one size, decoded one token at a time."""

    mixed = False  # all rows are of one method and budget

    def __init__(self, like: CacheState, rows: int = 0) -> None:
        """like: a cache such as those it is for"""
        super().__init__(like.model)
        rule, self.rows, self.active_rows = step_rule(like), rows, rows
        assert rule is not None
        self.rule, self.longest, self.kv_heads = rule, rule.tokens + 1, key_shape(like.model)[0]
        self.allocated: set[int] = set()
        self.calls: list[AttentionCall] = []  # of the block's layers so far
        devices = layer_devices(self.model)
        device_of = {i: devices.get(i, execution_device(self.model)) for i in self.compressed_layers}
        moved: dict[Any, Any] = {}  # one rotation for all layers that share it
        self.rotations = {
            i: each and moved.setdefault((id(each), device_of[i]), each.to(device_of[i]))
            for i, each in like.rotations.items()
        }
        self.blocks = [
            StepBlock(self._shape(layers, device_of[layers[0]]), rows)
            for first in range(0, len(device_of), BLOCK_LAYERS)
            for layers in runs(self.compressed_layers[first : first + BLOCK_LAYERS], device_of.__getitem__)
        ]
        self.block_of = {i: (block, number) for block in self.blocks for number, i in enumerate(block.shape.layers)}

    def _shape(self, layers: Sequence[int], device: torch.device) -> StepShape:
        rule, placed = self.rule, self.rule.method.placement is not None
        sizes = query_heads(self.model), self.kv_heads, self.longest, key_shape(self.model)[1]
        width = rule.memory.width if rule.memory else 0
        needed = width, placed, rule.moved_sinks, rule.needs_attention
        return StepShape(layers, *sizes, self.model.dtype, device, *needed)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def seen(self) -> int:
        return 1  # not empty; every row has position ids of its own

    # the size of the pool, as `RowPool` has it

    @property
    def tokens(self) -> int:
        return self.rows * self.slots_of(0)

    def slots_of(self, tokens: int) -> int:
        """Of a row, however many tokens it will have."""
        return self.longest * self.kv_heads

    def slots_needed(self, cache: CacheState, room: int) -> int:
        return self.slots_of(room)

    def grow(self, rows: int, tokens: int, longest: int) -> bool:
        """More rows, as many as fit into so many slots; those in use stay where they are. -> whether there are more"""
        before, self.rows = self.rows, max(self.rows, min(rows, tokens // self.slots_of(0)))
        for block in self.blocks if self.rows > before else ():
            block.grow(self.rows)
        return self.rows > before

    def fits(self, cache: CacheState, room: int) -> bool:
        return len(self.allocated) < self.rows

    def admit(self, row: int, cache: CacheState, room: int, source: int = 0) -> None:
        """Copy a row of a cache."""
        if row in self.allocated:
            raise CacheMisuse(f"row {row} is in use.")
        self.allocated.add(row)
        for block in self.blocks:
            block.put(row, [cache.backend.store[i] for i in block.shape.layers], cache.seen, source)

    def release(self, row: int) -> None:
        self.allocated.remove(row)
        for block in self.blocks:
            block.release(row)

    def copy_decoded(self, row: int, cache: CacheState, count: int) -> None:
        """Bring the cache of an admitted row to what it is after `count` decoded tokens: a step more is taken back."""
        if int(self.blocks[0].rows.lengths[row]) > cache.seen + count:
            for block in self.blocks:
                block.undo(row)
        kept = self.take(row, cache.backend.store[self.compressed_layers[0]].lengths[0] + count)
        cache.append_decoded(count, lambda i: cache.backend.store[i].fill([kept[i]]))

    def take(self, row: int, most: int) -> dict[int, list[Tokens]]:
        """What a row holds, by layer, of each key head. most: the tokens it was admitted with, and all since"""
        kept: dict[int, list[Tokens]] = {}
        for block in self.blocks:
            if block.shape.sinks:
                self._move_sinks(block, slice(row, row + 1))
            kept |= dict(zip(block.shape.layers, block.take(row, min(most, self.rule.tokens)), strict=True))
        return kept

    @contextmanager
    def graph_capture_scratch(self, rows: int) -> Iterator[None]:
        """Within, forward passes change nothing: no row is in use."""
        self.set_active_rows(rows)
        with ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(block.no_row_in_use())
            yield

    def begin_forward(self) -> None:
        self.calls = []  # of a forward pass that was cut short

    def set_active_rows(self, rows: int) -> None:
        """The next forward passes are of the first `rows` rows."""
        self.active_rows = rows

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """One token for every row; rows not in use write to a slot of their own."""
        block, number = self.block_of[index]
        output = block.attend(number, self.active_rows, call.query, call.key, call.value, *call.how)
        self.calls.append(call)
        if index == block.shape.layers[-1]:
            calls, self.calls = self.calls, []
            self._evict(block, calls)
        return call.to_hf_output(output)

    def _evict(self, block: StepBlock, calls: Sequence[AttentionCall]) -> None:
        """One token of every key head that is full, in layers of one kind at once."""
        kinds = [(call.scale, call.softcap, call.sink_logits is None) for call in calls]
        for first, *rest in runs(range(len(calls)), kinds.__getitem__):
            layers = slice(first, first + 1 + len(rest))
            step = self.rule.update_token_state(self._step(block, layers, calls[layers]))
            block.evict(self.active_rows, layers, self.rule.lowest_scored(step), step.token_state)
        block.advance(self.active_rows)
        if block.shape.sinks:
            self._move_sinks(block, slice(self.active_rows))

    def _step(self, block: StepBlock, layers: slice, calls: Sequence[AttentionCall]) -> Step:
        """Insert the new tokens. -> the layers as further rows"""

        def flat(part: Tensor) -> Tensor:
            return part if part is NOTHING else part.flatten(0, 1)

        rows, how = self.active_rows, (calls[0].scale, calls[0].softcap, self._sink_logits(calls))
        slots, lengths = block.slots(rows, layers), block.rows.lengths[:rows, None].expand(-1, len(calls))
        slots.insert(lengths)
        stored = flat(slots.token_positions), flat(slots.token_state), flat(slots.free_slot)
        value = torch.stack([call.value[:, :, 0] for call in calls], 1)
        return Step(*stored, flat(block.logits(rows, layers)), flat(value), flat(lengths) + 1, *how)

    def _sink_logits(self, calls: Sequence[AttentionCall]) -> Tensor | None:
        """[rows * layers, kv_heads, group]"""
        each = [call.sink_logits for call in calls if call.sink_logits is not None]
        return torch.stack(each).unflatten(1, (self.kv_heads, -1)).repeat(self.active_rows, 1, 1) if each else None

    def _move_sinks(self, block: StepBlock, rows: slice) -> None:
        """To their positions for the next token, in rows that have evicted."""
        lengths, admitted = block.rows.lengths[rows], block.rows.sink_positions[rows]
        evicted = (lengths > self.rule.tokens)[:, None]
        target = torch.where(evicted, self.rule.sink_positions(lengths), admitted)
        block.move_sinks(rows, target, [self.rotations[i] for i in block.shape.layers])
