"""Key heads with one free slot each: the next token goes there, and the token evicted for it leaves the next free slot.

`InplaceBatch`: full layers of a cache. Positions and token state move into one buffer, the layers as further rows, so
that a decode step selects for all of them at once. Keys and values stay where they are. The layers are views of the
buffer until one is repacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.storage.ragged import RaggedLayer
from kvkeep.types import NOTHING


@dataclass
class SlotState:
    """What is stored with every token, but for its key and value."""

    token_positions: Tensor  # [.., kv_heads, slots]
    free_slot: Tensor  # [.., kv_heads] of the next token
    rope_positions: Tensor | None = None
    token_state: Tensor = NOTHING  # [.., kv_heads, slots, k]

    def insert(self, positions: Tensor) -> None:
        """The new tokens; their slots are free, so an interrupted pass loses nothing. positions [..]"""
        slot = self.free_slot[..., None]
        where = positions[..., None, None].expand_as(slot).to(self.token_positions.dtype)
        self.token_positions.scatter_(-1, slot, where)
        if self.rope_positions is not None:
            self.rope_positions.scatter_(-1, slot, where)
        if len(self.token_state):
            self.token_state.scatter_(-2, slot[..., None].expand(*slot.shape, self.token_state.shape[-1]), 0.0)


class InplaceBatch(SlotState):
    """Each layer has one free slot in every segment. "Rows" are those of all layers."""

    def __init__(self, layers: Sequence[RaggedLayer]) -> None:
        self.layers = layers
        rows, kv_heads = len(layers) * layers[0].rows, layers[0].kv_heads
        moved = [name for name in layers[0].flat.parts if name not in ("keys", "values")]
        joined = {name: torch.cat([layer.flat.parts[name] for layer in layers]) for name in moved}
        for i, layer in enumerate(layers):
            layer.flat = replace(layer.flat, **{name: joined[name].chunk(len(layers))[i] for name in moved})
        views = {name: joined[name].unflatten(0, (rows, kv_heads, -1)) for name in moved}  # [rows, kv_heads, n + 1, …]
        self.segment_starts = torch.cat([layer.segment_starts for layer in layers])
        self.free_slots = [layer.free_slots for layer in layers]
        free_slot = (torch.cat(self.free_slots) - self.segment_starts).view(rows, kv_heads)
        super().__init__(free_slot=free_slot, **views)

    @property
    def is_valid(self) -> bool:
        """No layer was repacked since, and the buffers may be written to."""
        writable = torch.is_inference_mode_enabled() or not self.token_positions.is_inference()
        pairs = zip(self.layers, self.free_slots, strict=True)
        return writable and all(layer.free_slots is slots for layer, slots in pairs)

    def evict(self, slots: Tensor, token_state: Tensor) -> None:
        """Free one slot of every row and key head, and store the new token state. slots [rows, kv_heads]"""
        if len(token_state):
            self.token_state.copy_(token_state)
        self.free_slot = slots
        self.free_slots = list((self.segment_starts + slots.flatten()).chunk(len(self.layers)))
        for layer, free in zip(self.layers, self.free_slots, strict=True):
            layer.free_slots = free
