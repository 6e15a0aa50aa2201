"""One token in, one token out: a decode step over a full cache, in place and for all rows at once.

Only for methods whose scorer can judge a single step, with equal heads and layers; others compete the general way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache.layer import LayerCache
from kvkeep.compress.allocate.heads import EqualHeads
from kvkeep.compress.allocate.layers import EqualLayers
from kvkeep.compress.method import Method
from kvkeep.compress.place import Where
from kvkeep.engine.arrival import Arrival
from kvkeep.kernels.reference import attend_even, attend_step
from kvkeep.model.attention import Handover
from kvkeep.model.rotary import Rotation
from kvkeep.types import NOWHERE, Step, Tokens


@dataclass
class Stepper:
    method: Method
    budget: int | float
    rotations: dict[int, Rotation | None]
    window: int

    def __post_init__(self) -> None:
        self.able = (
            isinstance(self.budget, int)
            and hasattr(self.method.scorer, "step")
            and self.method.group is None
            and self.method.reuse == 1
            and isinstance(self.method.heads, EqualHeads)
            and isinstance(self.method.layers, EqualLayers)
        )
        self.moving: list[tuple[int, Tokens, bool]] = []
        self.sinks: dict[int, tuple] = {}  # layer -> the first tokens' keys and places when last packed, and when

    def can_swap(self, layer: LayerCache, arrival: Arrival) -> bool:
        """Every row gets one token, has no room for it, and holds as much as every other."""
        return self.able and arrival.is_step and all(arrival.due) and layer.is_even and layer.lengths[0] == self.budget

    def can_grow(self, layer: LayerCache, arrival: Arrival) -> bool:
        """There is room for the new token, but the notes beside the others want to know of it."""
        remembers = self.method.memory is not None and isinstance(self.budget, int)
        return remembers and bool(layer) and arrival.is_step and not any(arrival.due) and layer.is_even

    def begin(self, arrival: Arrival, seen: list[int], device: torch.device) -> None:
        """What all layers of a forward pass share: how far each row is, and where its first tokens belong."""
        self.moving = []
        self.turns: dict[tuple, tuple[Tensor, Tensor]] = {}
        self.positions = torch.cat(arrival.positions)
        self.lengths = [before + 1 for before in seen]
        moves = self.able and self.method.place and self.method.guard.sinks and min(seen) >= self.budget
        self.places = self._places(device) if moves else None

    def _places(self, device: torch.device) -> Tensor | None:
        """Where every row's sinks belong among the tokens that stay after this one; None where they always stood.

        [rows, sinks]
        """
        sinks, late, rows = self.method.guard.sinks, self.budget - self.method.guard.sinks, []
        for length in self.lengths:
            kept = torch.cat([torch.arange(sinks), torch.arange(length - late, length)])
            rows.append(self.method.place(Where(kept, length, self.budget, self.window))[:sinks])
        places = torch.stack(rows)
        return None if bool((places == torch.arange(sinks)).all()) else places.to(device, torch.int32)

    def grow(self, layer: LayerCache, new: Handover, arrival: Arrival) -> Tensor:
        """Append, attend, and bring the notes up to date. -> attention's output [rows, heads, 1, dim]"""
        layer.append(new.key.detach(), new.value.detach(), arrival.positions, None)
        tokens = layer.even()
        newest = torch.full(tokens.keys.shape[:2], tokens.keys.shape[2] - 1, device=tokens.keys.device)
        output, now = self._attend(new, tokens, newest)
        layer.annotate(self.method.memory.step(now, self.budget))
        return output

    def swap(self, index: int, layer: LayerCache, new: Handover) -> Tensor:
        """-> attention's output [rows, heads, 1, dim]; the least worth keeping of each key head is gone"""
        packed = layer.hole is None
        positions = self.positions.to(new.key.device)
        tokens, newest = layer.swap_in(new.key[:, :, 0].detach(), new.value[:, :, 0].detach(), positions)
        output, now = self._attend(new, tokens, newest)
        if self.method.memory:
            now = self._remember(layer, now)
        layer.vacate(self._victims(now))
        if self.places is not None:
            self.moving.append((index, tokens, packed))
        return output

    def _attend(self, new: Handover, tokens: Tokens, newest: Tensor) -> tuple[Tensor, Step]:
        logits = chances = None
        how = (new.query, tokens.keys, tokens.values, new.scale, new.softcap, new.sinks)
        if self.method.scorer.looks:
            output, logits, chances = attend_step(*how)
        else:
            output = attend_even(*how)
        return output, Step(tokens, newest, logits, chances, new.value[:, :, 0].detach(), self.lengths, new.scale)

    def _remember(self, layer: LayerCache, now: Step) -> Step:
        """New notes beside the tokens; the old ones stay as they were, in case the forward pass is cut short."""
        notes = self.method.memory.step(now, self.budget)
        layer.flat = replace(layer.flat, notes=notes.flatten(0, 2))
        return replace(now, tokens=replace(now.tokens, notes=notes))

    def _victims(self, now: Step) -> Tensor:
        """The token each key head can best do without; of equals, the earliest. [rows, kv_heads]"""
        worth = self.method.scorer.step(now, self.budget).float()
        worth = worth.masked_fill(self.method.guard.step(now, self.budget), float("inf"))
        lowest = worth <= worth.amin(-1, keepdim=True)
        return torch.where(lowest, now.tokens.positions, NOWHERE).argmin(-1)

    def finish(self) -> None:
        """All layers are through: where keys are moved, move those that stay for the next token."""
        for index, tokens, packed in self.moving:
            self._move_sinks(index, tokens, packed)
        self.moving = []

    def _move_sinks(self, index: int, tokens: Tokens, packed: bool) -> None:
        """Turn the first tokens' keys, always from where they were last packed, so that no error builds up."""
        n = self.method.guard.sinks  # they are never dropped, so they lie first
        if packed:
            self.sinks[index] = tokens.keys[:, :, :n].clone(), tokens.places[:, :1, :n].clone(), tuple(self.lengths)
        keys, places, when = self.sinks[index]
        wanted = self.places.to(places.device)[:, None]
        if (rotation := self.rotations[index]) is not None:
            alike = (id(rotation), when)  # layers packed at the same time turn alike
            if alike not in self.turns:
                self.turns[alike] = rotation.angles(wanted - places)
            tokens.keys[:, :, :n] = rotation.rotated(keys, *self.turns[alike])
        tokens.places[:, :, :n] = wanted
