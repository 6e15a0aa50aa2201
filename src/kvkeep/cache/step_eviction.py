"""One token in, one token out: a decode step over a full cache, in place, for all rows and layers at once.

A layer only takes the newcomer in and attends; what goes is decided when the last layer is through, for layers alike in
one batch (storage/inplace.py). So a pass that is cut short has changed nothing. Only for methods whose scorer can judge
a single step, with equal heads and layers; others compete the general way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache.padding import Arrival
from kvkeep.compress.budget.heads import EqualHeads
from kvkeep.compress.budget.layers import EqualLayers
from kvkeep.compress.method import Method
from kvkeep.compress.positions import Where
from kvkeep.kernels.torch.reference import attend_even, attend_step
from kvkeep.model.hf_attention import Handover
from kvkeep.model.rope import Rotation
from kvkeep.storage.inplace import Swap
from kvkeep.storage.ragged import LayerCache
from kvkeep.types import NOWHERE, Step


@dataclass(frozen=True)
class Went:
    """What one layer left behind for the decision."""

    layer: LayerCache
    logits: Tensor | None
    chances: Tensor | None
    value: Tensor  # [rows, kv_heads, dim]
    scale: float
    softcap: float | None
    sinks: Tensor | None  # [heads]
    rotation: Rotation | None
    swapped: bool  # the cache is full: one token has to go

    @property
    def kind(self) -> tuple:
        """Layers of one kind can be decided for together."""
        like, size = self.layer.flat.positions, self.layer.token_nbytes
        how = self.scale, self.softcap, self.sinks is None, id(self.rotation)
        return self.swapped, like.device, self.layer.kv_heads, like.shape, size, *how


@dataclass
class Moving:
    """The first tokens' keys as they were packed, and where they stood: turned from there, no error builds up."""

    keys: Tensor  # [layers, rows, kv_heads, sinks, dim]
    places: Tensor  # [rows, sinks]


@dataclass
class Stepper:
    method: Method
    budget: int | float
    rotations: dict[int, Rotation | None]
    window: int

    def __post_init__(self) -> None:
        memory = self.method.memory
        self.remembers = memory is not None and isinstance(self.budget, int) and hasattr(memory, "step")
        # what is remembered of a token is the attention it got, whoever judges by it
        self.looks = memory is not None or getattr(self.method.scorer, "looks", True)
        self.able = (
            isinstance(self.budget, int)
            and hasattr(self.method.scorer, "step")
            and (memory is None or self.remembers)
            and self.method.group is None
            and self.method.reuse == 1
            and isinstance(self.method.heads, EqualHeads)
            and isinstance(self.method.layers, EqualLayers)
        )
        self.went: list[Went] = []
        self.swaps: dict[tuple, tuple[Swap, Moving | None]] = {}

    def can_swap(self, layer: LayerCache, arrival: Arrival) -> bool:
        """Every row gets one token, has no room for it, and holds as much as every other."""
        return self.able and arrival.is_step and all(arrival.due) and layer.is_even and layer.lengths[0] == self.budget

    def can_grow(self, layer: LayerCache, arrival: Arrival) -> bool:
        """There is room for the new token, but the notes beside the others want to know of it."""
        return self.remembers and bool(layer) and arrival.is_step and not any(arrival.due) and layer.is_even

    def begin(self, arrival: Arrival, seen: list[int]) -> None:
        """What all layers of a forward pass share: how far each row is, and where its first tokens belong."""
        self.forget()
        self.positions = torch.cat(arrival.positions)
        self.lengths = [before + 1 for before in seen]
        moves = self.able and self.method.place and self.method.guard.sinks and min(seen) >= self.budget
        self.places = self._places() if moves else None

    def _places(self) -> Tensor | None:
        """Where every row's sinks belong among the tokens that stay after this one; None where they always stood.

        [rows, sinks]
        """
        sinks, late, rows = self.method.guard.sinks, self.budget - self.method.guard.sinks, []
        for length in self.lengths:
            kept = torch.cat([torch.arange(sinks), torch.arange(length - late, length)])
            rows.append(self.method.place(Where(kept, length, self.budget, self.window))[:sinks])
        places = torch.stack(rows)
        return None if bool((places == torch.arange(sinks)).all()) else places.to(torch.int32)

    def grow(self, index: int, layer: LayerCache, new: Handover, arrival: Arrival) -> Tensor:
        """Append and attend. -> attention's output [rows, heads, 1, dim]"""
        layer.append(new.key.detach(), new.value.detach(), arrival.positions, None)
        tokens = layer.even()
        return self._attend(index, layer, new, tokens.keys, tokens.values, swapped=False)

    def swap(self, index: int, layer: LayerCache, new: Handover) -> Tensor:
        """Take in one token more than the budget, and attend. -> attention's output [rows, heads, 1, dim]"""
        keys, values = layer.swap_in(new.key[:, :, 0].detach(), new.value[:, :, 0].detach())
        return self._attend(index, layer, new, keys, values, swapped=True)

    def _attend(
        self, index: int, layer: LayerCache, new: Handover, keys: Tensor, values: Tensor, swapped: bool
    ) -> Tensor:
        logits = chances = None
        how = (new.query, keys, values, new.scale, new.softcap, new.sinks)
        if self.looks:
            output, *told = attend_step(*how)
            logits, chances = (each.detach() for each in told)
        else:
            output = attend_even(*how)
        value, rotation = new.value[:, :, 0].detach(), self.rotations.get(index)
        self.went.append(Went(layer, logits, chances, value, *how[3:], rotation, swapped))
        return output

    @torch.no_grad()
    def finish(self) -> None:
        """All layers are through: note what they saw, and let go of what each key head can best do without."""
        for kind, alike in _alike(self.went).items():
            if alike[0].swapped:
                self._let_go(kind, alike)
            else:
                self._note(alike)
        self.forget()

    def forget(self) -> None:
        """What layers left behind is done with, or was never to be."""
        self.went = []

    def _note(self, alike: Sequence[Went]) -> None:
        """There was room: only what is remembered of the tokens changes."""
        each = [[one.layer.evenly(part) for part in (one.layer.flat.positions, one.layer.flat.notes)] for one in alike]
        positions, notes = (torch.cat(parts) for parts in zip(*each, strict=True))
        newest = torch.full(positions.shape[:2], positions.shape[2] - 1, device=positions.device)
        noted = self.method.memory.step(self._step(alike, positions, notes, newest), self.budget)
        for (_, mine), new in zip(each, noted.chunk(len(alike)), strict=True):
            mine.copy_(new)

    def _let_go(self, kind: tuple, alike: Sequence[Went]) -> None:
        swap, moving = self.swaps.get(kind, (None, None))
        if swap is None or not swap.stands or len(swap.layers) != len(alike):
            swap = Swap([one.layer for one in alike])
            moving = None
        swap.arrive(self.positions.to(swap.positions.device))
        now = self._step(alike, swap.positions, swap.notes, swap.newest)
        if self.method.memory:
            now = replace(now, notes=self.method.memory.step(now, self.budget))
        swap.leave(self._victims(now), now.notes)
        if self.places is not None:
            moving = moving or self._moving(swap)
            self._move(swap, moving, alike[0].rotation)
        self.swaps[kind] = swap, moving

    def _step(self, alike: Sequence[Went], positions: Tensor, notes: Tensor | None, newest: Tensor) -> Step:
        """Layers alike as one batch."""
        logits, chances = (
            torch.cat([getattr(one, part) for one in alike]) if self.looks else None for part in ("logits", "chances")
        )
        value = torch.cat([one.value for one in alike])
        sinks, one = None, alike[0]
        if one.sinks is not None:
            each = [one.sinks.view(1, one.layer.kv_heads, -1).expand(len(self.lengths), -1, -1) for one in alike]
            sinks = torch.cat(each)
        lengths = self.lengths * len(alike)
        return Step(positions, notes, newest, logits, chances, value, lengths, one.scale, one.softcap, sinks)

    def _victims(self, now: Step) -> Tensor:
        """The token each key head can best do without; of equals, the earliest. [rows, kv_heads]"""
        worth = self.method.scorer.step(now, self.budget).float()
        worth = worth.masked_fill(self.method.guard.step(now, self.budget), float("inf"))
        lowest = worth <= worth.amin(-1, keepdim=True)
        return torch.where(lowest, now.positions, NOWHERE).argmin(-1)

    def _moving(self, swap: Swap) -> Moving:
        n, rows = self.method.guard.sinks, swap.layers[0].rows
        return Moving(torch.stack([_first(layer, n) for layer in swap.layers]), swap.places[:rows, 0, :n].clone())

    def _move(self, swap: Swap, moving: Moving, rotation: Rotation | None) -> None:
        """Turn the first tokens' keys to where the next token wants them."""
        n = moving.places.shape[1]
        wanted = self.places.to(moving.places.device)
        if rotation is not None:
            turned = rotation.turn(moving.keys, (wanted - moving.places)[:, None])
            for layer, keys in zip(swap.layers, turned, strict=True):
                _first(layer, n).copy_(keys)
        swap.places[:, :, :n] = wanted.repeat(len(swap.layers), 1)[:, None]


def _alike(went: Sequence[Went]) -> dict[tuple, list[Went]]:
    """Layers in batches of one kind."""
    kinds: dict[tuple, list[Went]] = {}
    for one in went:
        kinds.setdefault(one.kind, []).append(one)
    return kinds


def _first(layer: LayerCache, n: int) -> Tensor:
    """The keys of a full layer's sinks: never dropped, so they lie first. [rows, kv_heads, n, dim]"""
    return layer.flat.keys.view(layer.rows, layer.kv_heads, -1, layer.flat.keys.shape[-1])[:, :, :n]
