"""At every moment, no key is farther from a query than the model was trained for: methods that give keys new positions.

Positions of queries go on with the text, so keys that stay where they are get farther away with every token. Before a
forward pass takes one of them out of reach, they are moved on; where that is not enough, the pass is too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvkeep.cache.padding import BatchLayout
from kvkeep.compress.method import Method
from kvkeep.compress.positions import move_within, reserved
from kvkeep.errors import BadParameter, CacheMisuse
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.storage.ragged import RaggedLayer
from kvkeep.types import Budget, Tokens


def budget_within(method: Method, budget: int | float, context_length: int) -> tuple[Budget, int]:
    """The budget, and how long a text is kept whole though the budget is less.

    Beyond the context length, a method that gives keys new positions needs room within it for the next tokens.
    """
    most = context_length - reserved(context_length)
    if method.placement is None or isinstance(budget, int) and budget <= most:
        return Budget(budget), 0
    whole = min(budget, context_length - 1) if isinstance(budget, int) else 0
    return Budget(budget, most), whole


@dataclass
class KeyReach:
    """The keys of a cache, and how long its rows may get before one of them is out of reach."""

    store: dict[int, RaggedLayer]
    rotations: dict[int, Rotation | None]
    context_length: int
    known: dict[int, int] = field(default_factory=dict)  # row -> tokens of text; it may be more

    def longest(self, row: int | None = None) -> int:
        """The number of tokens of the fullest KV head, of one row or of all."""
        layers = [layer for layer in self.store.values() if layer]
        return max((max(layer.lengths if row is None else layer.row_lengths(row)) for layer in layers), default=0)

    @property
    def chunk_limit(self) -> int:
        """The largest number of tokens of the next forward pass."""
        longest = self.longest()
        if longest >= self.context_length:
            raise BadParameter(
                f"a KV head holds {longest} tokens, which leaves no room for another within the context length of "
                f"{self.context_length}; use a smaller budget."
            )
        return self.context_length - longest

    def prepare(self, layout: BatchLayout, count: int) -> BatchLayout:
        """Move keys into reach of the next `count` tokens. -> rows that have no room for more are evicted from"""
        if not self.make_room(layout.seen, count):
            raise CacheMisuse(
                f"a forward pass of {count} tokens attends to keys farther away than the context length of "
                f"{self.context_length}; pass {self.chunk_limit} tokens or fewer at a time (prefill_chunk_size=)."
            )
        full = [self.longest(row) + n >= self.context_length for row, n in enumerate(layout.counts)]
        if not any(full):
            return layout
        due = [now or out for now, out in zip(layout.evict_now, full, strict=True)]
        return replace(layout, evict_now=due, frozen=False)

    @torch.no_grad()
    def make_room(self, seen: Sequence[int], count: int) -> bool:
        """Move keys so that rows that have seen so many tokens may see `count` more. -> whether they can be"""
        if self._fits(seen, count):
            return True
        layers = [layer for layer in self.store.values() if layer]
        lowest = [self._lowest(layers, row) for row in range(len(seen))] if layers else [0] * len(seen)
        self.known = {row: first + self.context_length for row, first in enumerate(lowest)}
        if not self._fits(seen, count) and count <= self.chunk_limit:
            self._move(seen, max(count, min(self.chunk_limit, reserved(self.context_length))))
        return self._fits(seen, count)

    def _fits(self, seen: Sequence[int], count: int) -> bool:
        return all(n + count <= self.known.get(row, 0) for row, n in enumerate(seen))

    def _lowest(self, layers: Sequence[RaggedLayer], row: int) -> int:
        """The first RoPE position of a row's keys."""
        heads = [head.parts["rope_positions"] for layer in layers for head in layer.row(row)]
        return min((int(positions.min()) for positions in heads if len(positions)), default=0)

    def _move(self, seen: Sequence[int], room: int) -> None:
        first = {row: n + room - self.context_length for row, n in enumerate(seen)}
        for index, layer in self.store.items():
            rotation = self.rotations[index]
            layer.fill([
                [placed(head, move_within(head.parts["rope_positions"], first[row]), rotation) for head in heads]
                for row, heads in enumerate(layer.all_rows())
            ])  # fmt: skip
        self.known = {row: max(self.known[row], lowest + self.context_length) for row, lowest in first.items()}


def placed(head: Tokens, positions: Tensor, rotation: Rotation | None) -> Tokens:
    """The tokens of a KV head, with keys rotated to these RoPE positions."""
    before = head.parts["rope_positions"]
    keys = rotation.rotate(head.keys, positions - before) if rotation else head.keys
    return replace(head, keys=keys, rope_positions=positions.to(before.dtype))
