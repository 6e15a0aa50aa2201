"""Layers of one shape that drop one token for each that comes: their bookkeeping as one batch.

What is known of their tokens (where they stood, where they stand, what is remembered of them) moves into one buffer,
the layers one after the other as further rows, so that a decode step decides for all of them at once. Keys and values
stay where they are. The layers see the same numbers through views until one of them is packed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.storage.ragged import LayerCache
from kvkeep.types import Tokens


class Swap:
    """Full layers, each with one free slot in every segment. "Rows" are those of all layers."""

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        self.layers = layers
        rows, kv_heads = len(layers) * layers[0].rows, layers[0].kv_heads
        joined = [
            None if same[0] is None else torch.cat(same)
            for same in zip(*(layer.flat.parts[2:] for layer in layers), strict=True)
        ]
        for i, layer in enumerate(layers):
            mine = (None if all_of is None else all_of.chunk(len(layers))[i] for all_of in joined)
            layer.flat = Tokens(layer.flat.keys, layer.flat.values, *mine)
        self.positions, self.places, self.notes = (  # [rows, kv_heads, n + 1, …]
            None if all_of is None else all_of.view(rows, kv_heads, -1, *all_of.shape[1:]) for all_of in joined
        )
        self.firsts = torch.cat([layer.firsts for layer in layers])
        self.holes = [layer.hole for layer in layers]
        self.newest = (torch.cat(self.holes) - self.firsts).view(rows, kv_heads)  # the slot the next token takes

    @property
    def stands(self) -> bool:
        """No layer was packed again since, and the buffers may be written to."""
        writable = torch.is_inference_mode_enabled() or not self.positions.is_inference()
        return writable and all(layer.hole is hole for layer, hole in zip(self.layers, self.holes, strict=True))

    def arrive(self, positions: Tensor) -> None:
        """Note the new token of each row; the slot is free, so nothing is lost if it is not to be. positions [rows]"""
        slot = self.newest[..., None]
        where = positions.repeat(len(self.layers))[:, None, None].expand_as(slot)
        self.positions.scatter_(2, slot, where)
        if self.places is not None:
            self.places.scatter_(2, slot, where)
        if self.notes is not None:
            self.notes.scatter_(2, slot[..., None].expand(-1, -1, -1, self.notes.shape[-1]), 0.0)

    def leave(self, slots: Tensor, notes: Tensor | None) -> None:
        """Free one slot of every row and key head, and remember what is to be. slots [rows, kv_heads]"""
        if notes is not None:
            self.notes.copy_(notes)
        self.newest = slots
        self.holes = (self.firsts + slots.flatten()).chunk(len(self.layers))
        for layer, hole in zip(self.layers, self.holes, strict=True):
            layer.hole = hole
