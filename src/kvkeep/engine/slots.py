"""Many rows decoded together: what caches keep of one text, side by side in slots that are as long as the longest.

Nothing competes here: a question and its answer are added to copies of what was kept, and the caches stay as they are,
so one compressed text serves many questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.engine.graph import LONGEST, Replay
from kvkeep.engine.session import Cache
from kvkeep.errors import CacheMisuse
from kvkeep.kernels.best import attend_slots
from kvkeep.model.adapter import AdaptedCache, OwnedLayer
from kvkeep.model.attention import Handover
from kvkeep.types import Tokens

WARM = 8  # single tokens added before a pass is captured: a short answer is over sooner than that pays


@dataclass
class Slots:
    """One layer's rows. keys and values [rows, kv_heads, size, dim], of which each head's first `lengths` are used"""

    keys: Tensor
    values: Tensor
    lengths: Tensor  # [rows, kv_heads]

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Put q new tokens behind every head's own. keys, values [rows, kv_heads, q, dim]"""
        where = (self.lengths[..., None] + torch.arange(keys.shape[2], device=keys.device))[..., None]
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer.scatter_(2, where.expand(-1, -1, -1, buffer.shape[-1]), new.to(buffer.dtype))
        self.lengths += keys.shape[2]


class Together(AdaptedCache):
    """A cache of many rows, each with what another cache kept of the same text."""

    def __init__(self, model: Any, caches: Sequence[Cache], room: int):
        """room: tokens that may be added to each row."""
        super().__init__(model)
        if len({cache.seen for cache in caches}) != 1 or any(len(cache.arrivals.seen) != 1 for cache in caches):
            raise CacheMisuse("only caches of one row that read the same text can be decoded together.")
        self.now = caches[0].seen
        self.end = self.now + room
        room += LONGEST
        self.slots = {index: _slots([cache.store[index].row(0) for cache in caches], room) for index in self.owned}
        self.copy_stock(caches[0])
        for layer in self.layers:
            if not isinstance(layer, OwnedLayer):
                layer.batch_repeat_interleave(len(caches))
        self._prepare(len(caches))

    def _prepare(self, rows: int) -> None:
        """What a pass of one token for each row reads, where it can be captured."""
        self.tokens, self.places = torch.zeros(2, rows, 1, dtype=torch.int64, device=self.model.device)
        self.steps, self.step = 0, self._step

    @property
    def seen(self) -> int:
        return self.now

    def attend(self, index: int, new: Handover) -> tuple[Tensor, Tensor | None]:
        slots = self.slots[index]
        slots.add(new.key.detach(), new.value.detach())
        output = attend_slots(new.query, slots.keys, slots.values, slots.lengths, new.scale, new.softcap, new.sinks)
        return new.outcome(output)

    def feed(self, ids: Tensor, keep: int = 1) -> Tensor:
        """One forward pass. ids [rows, q] -> logits of the last `keep` tokens, 0: of all [rows, keep, vocabulary]"""
        if self.now + ids.shape[1] > self.end:
            raise CacheMisuse(f"{ids.shape[1]} tokens were to be added where {self.end - self.now} have room.")
        with torch.inference_mode():
            if ids.shape[1] == 1 and len(self.owned) == len(self.layers):
                logits = self._single(ids)
            else:
                logits = self.model(ids.to(self.model.device), past_key_values=self, logits_to_keep=keep).logits
        self.now += ids.shape[1]
        return logits

    def _single(self, ids: Tensor) -> Tensor:
        """The same for one token each, captured when there were enough of them. -> valid until the next pass"""
        self.tokens.copy_(ids)
        self.places.fill_(self.now)
        self.steps += 1
        if self.steps == WARM:
            lengths = {index: slots.lengths.clone() for index, slots in self.slots.items()}
            self.step = Replay(self._step, self.model)
            for index, before in lengths.items():
                self.slots[index].lengths.copy_(before)
        return self.step()

    def _step(self) -> Tensor:
        return self.model(self.tokens, position_ids=self.places, past_key_values=self).logits

    def take(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        which = torch.tensor(rows)
        for index, slots in self.slots.items():
            mine = which.to(slots.keys.device)
            self.slots[index] = Slots(slots.keys[mine], slots.values[mine], slots.lengths[mine])
        for layer in self.layers:
            if not isinstance(layer, OwnedLayer):
                layer.batch_select_indices(which)
        self._prepare(len(rows))


def _slots(rows: Sequence[Sequence[Tokens]], room: int) -> Slots:
    """What every row's key heads hold, copied to the beginning of slots with room at the end."""
    lengths = torch.tensor([[len(head.keys) for head in heads] for heads in rows])
    like = rows[0][0]
    size = int(lengths.max()) + room
    buffers = [like.keys.new_zeros(*lengths.shape, size, t.shape[-1]) for t in (like.keys, like.values)]
    for row, heads in enumerate(rows):
        for number, head in enumerate(heads):
            for buffer, part in zip(buffers, (head.keys, head.values), strict=True):
                buffer[row, number, : len(part)] = part
    return Slots(*buffers, lengths.to(like.keys.device))


def packs(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Rows of like size together, so that at most half of their slots lie empty, and no more than `most` are made.

    -> their numbers, largest first
    """
    found: list[list[int]] = []
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        held = sum(sizes[other] for other in found[-1]) + sizes[row] if found else 0
        slots = (len(found[-1]) + 1) * sizes[found[-1][0]] if found else 0
        if found and slots <= min(2 * held, most):
            found[-1].append(row)
        else:
            found.append([row])
    return found
