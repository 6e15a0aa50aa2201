"""Many rows decoded together: what caches keep of one text, side by side.

Nothing competes here: a question and its answer are added to copies of what was kept, and the caches stay as they are,
so one compressed text serves many questions. A processor wants rows of equal size, a GPU has kernels for ragged ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.engine.cuda_graph import LONGEST, Replay
from kvkeep.errors import CacheMisuse
from kvkeep.kernels.dispatch import append_ragged, attend_ragged, attend_slots
from kvkeep.model.hf_attention import Handover
from kvkeep.model.hf_cache import AdaptedCache, OwnedLayer, runs_on
from kvkeep.types import Tokens

WARM = 8  # single tokens added before a pass is captured: a short answer is over sooner than that pays


@dataclass
class Slots:
    """One layer's rows. keys and values [rows, kv_heads, size, dim], of which each head's first `lengths` are used"""

    keys: Tensor
    values: Tensor
    lengths: Tensor  # [rows, kv_heads]

    @classmethod
    def of(cls, rows: Sequence[Sequence[Tokens]], room: int) -> Slots:
        """What every row's key heads hold, copied to the beginning of slots with room at the end."""
        lengths, like = _lengths(rows), rows[0][0]
        shape = *lengths.shape, int(lengths.max()) + room
        keys, values = (like.keys.new_zeros(*shape, t.shape[-1]) for t in (like.keys, like.values))
        for row, heads in enumerate(rows):
            for number, head in enumerate(heads):
                mine = row, number, slice(len(head.keys))
                keys[mine], values[mine] = head.keys, head.values
        return cls(keys, values, lengths.to(keys.device))

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Put q new tokens behind every head's own. keys, values [rows, kv_heads, q, dim]"""
        where = (self.lengths[..., None] + torch.arange(keys.shape[2], device=keys.device))[..., None]
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer.scatter_(2, where.expand(-1, -1, -1, buffer.shape[-1]), new.to(buffer.dtype))
        self.lengths += keys.shape[2]

    def attend(self, new: Handover) -> Tensor:
        return attend_slots(new.query, self.keys, self.values, self.lengths, new.scale, new.softcap, new.sinks)

    def take(self, rows: Tensor) -> Slots:
        return Slots(self.keys[rows], self.values[rows], self.lengths[rows])


@dataclass
class Ragged:
    """The same without empty slots: every head has a stretch of a flat buffer. keys and values [slots, dim]"""

    keys: Tensor
    values: Tensor
    starts: Tensor  # [rows, kv_heads]
    lengths: Tensor  # [rows, kv_heads]
    longest: int  # that a head can become

    @classmethod
    def of(cls, rows: Sequence[Sequence[Tokens]], room: int) -> Ragged:
        lengths, like = _lengths(rows), rows[0][0]
        *starts, total = accumulate((lengths + room).flatten().tolist(), initial=0)
        keys, values = (like.keys.new_zeros(total, t.shape[-1]) for t in (like.keys, like.values))
        for start, head in zip(starts, (head for heads in rows for head in heads), strict=True):
            mine = slice(start, start + len(head.keys))
            keys[mine], values[mine] = head.keys, head.values
        places = (torch.tensor(starts).view_as(lengths), lengths)
        return cls(keys, values, *(t.to(keys.device) for t in places), int(lengths.max()) + room)

    def add(self, keys: Tensor, values: Tensor) -> None:
        everybody = torch.ones_like(self.lengths[:, :1])
        for token in range(keys.shape[2]):
            new = (t[:, :, token : token + 1] for t in (keys, values))
            append_ragged(self.keys, self.values, *new, self.starts, self.lengths, everybody)

    def attend(self, new: Handover) -> Tensor:
        how = self.longest, new.scale, new.softcap, new.sinks
        return attend_ragged(new.query, self.keys, self.values, self.starts, self.lengths, *how)

    def take(self, rows: Tensor) -> Ragged:
        return replace(self, starts=self.starts[rows], lengths=self.lengths[rows])


def _lengths(rows: Sequence[Sequence[Tokens]]) -> Tensor:
    return torch.tensor([[len(head.keys) for head in heads] for heads in rows])


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
        kind = Ragged if is_ragged(model) else Slots
        self.slots = {index: kind.of([cache.store[index].row(0) for cache in caches], room) for index in self.owned}
        self.copy_stock(caches[0])
        for layer in self.layers:
            if not isinstance(layer, OwnedLayer):
                layer.batch_repeat_interleave(len(caches))
        self._prepare(len(caches))

    def _prepare(self, rows: int) -> None:
        """What a pass of one token for each row reads, where it can be captured."""
        self.tokens, self.places = torch.zeros(2, rows, 1, dtype=torch.int64, device=runs_on(self.model))
        self.steps, self.step = 0, None

    @property
    def seen(self) -> int:
        return self.now

    def attend(self, index: int, new: Handover) -> tuple[Tensor, Tensor | None]:
        slots = self.slots[index]
        slots.add(new.key.detach(), new.value.detach())
        return new.outcome(slots.attend(new))

    def feed(self, ids: Tensor, keep: int = 1) -> Tensor:
        """One forward pass. ids [rows, q] -> logits of the last `keep` tokens, 0: of all [rows, keep, vocabulary]"""
        if self.now + ids.shape[1] > self.end:
            raise CacheMisuse(f"{ids.shape[1]} tokens were to be added where {self.end - self.now} have room.")
        with torch.inference_mode():
            if ids.shape[1] == 1 and len(self.owned) == len(self.layers):
                logits = self._single(ids)
            else:
                logits = self.model(ids.to(runs_on(self.model)), past_key_values=self, logits_to_keep=keep).logits
        self.now += ids.shape[1]
        return logits

    def _single(self, ids: Tensor) -> Tensor:
        """The same for one token each, captured when there were enough of them. -> valid until the next pass"""
        self.tokens.copy_(ids)
        self.places.fill_(self.now)
        self.steps += 1
        if self.steps == WARM:
            lengths = {index: slots.lengths.clone() for index, slots in self.slots.items()}
            again = WeakMethod(self._step)  # weak: slots nobody holds are freed at once
            self.step = Replay(lambda: again()(), self.model)
            for index, before in lengths.items():
                self.slots[index].lengths.copy_(before)
        return self.step() if self.step else self._step()

    def _step(self) -> Tensor:
        return self.model(self.tokens, position_ids=self.places, past_key_values=self).logits

    def take(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        which = torch.tensor(rows)
        self.slots = {index: slots.take(which.to(slots.keys.device)) for index, slots in self.slots.items()}
        for layer in self.layers:
            if not isinstance(layer, OwnedLayer):
                layer.batch_select_indices(which)
        self._prepare(len(rows))


def is_ragged(model: Any) -> bool:
    """Whether rows may be of any size at no cost."""
    return model.device.type == "cuda"


def packs(sizes: Sequence[int], most: int, ragged: bool) -> list[list[int]]:
    """Rows to be decoded together, of no more than `most` slots; if not ragged, at most half of these lie empty.

    -> their numbers, largest first
    """
    found: list[list[int]] = []
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        last = found[-1] if found else []
        held = sum(sizes[other] for other in [*last, row])
        slots = held if ragged or not last else (len(last) + 1) * sizes[last[0]]
        if last and slots <= min(2 * held, most):
            last.append(row)
        else:
            found.append([row])
    return found
