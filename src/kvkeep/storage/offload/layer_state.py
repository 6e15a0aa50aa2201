"""One layer of one row of a cache that drops nothing: what is near, and what is put away.

A shelf is never changed. Every forward pass makes new ones, so a pass that is cut short has done nothing, and copies of
a cache share all they can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.storage.offload.host import Host, Pair


class Pile:
    """A tensor that only ever becomes longer, in a buffer with room. Never changed: who has less shares the buffer."""

    def __init__(self, buffer: Tensor, count: int, filled: list[int]) -> None:
        self.buffer, self.count, self.filled = buffer, count, filled  # filled: by whoever has most

    @classmethod
    def like(cls, new: Tensor, dtype: torch.dtype) -> Pile:
        """An empty one for such, whose numbers are kept as this type."""
        return cls(new[:, :0].to(dtype), 0, [0])

    def more(self, new: int) -> Pile:
        """With room for more at its end, to be filled at once."""
        end, buffer, filled = self.count + new, self.buffer, self.filled
        if filled[0] != self.count or end > buffer.shape[1]:
            shape = buffer.shape[0], max(32, end + end // 4), *buffer.shape[2:]
            with torch.inference_mode(False):  # it outlives the pass that needs it
                buffer, filled = torch.empty(shape, dtype=buffer.dtype, device=buffer.device), [0]
            buffer.narrow(1, 0, self.count).copy_(self.all)
        filled[0] = end
        return Pile(buffer, end, filled)

    def last(self, count: int) -> Tensor:
        return self.buffer.narrow(1, self.count - count, count)

    @property
    def all(self) -> Tensor:
        return self.buffer.narrow(1, 0, self.count).contiguous()

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes


@dataclass(frozen=True)
class Fetched:
    """What was fetched last, still on the device."""

    probe: Tensor | None  # who asked
    index: Tensor  # [1 or kv_heads, k] numbers of the tokens put away
    pair: Pair | None  # keys and values [kv_heads, k, dim]; None while they are on their way


@dataclass(frozen=True)
class Shelf:
    near: Pair  # keys as they came and values, [kv_heads, n, dim]: the newest tokens, without a gap
    host: Host
    seen: int = 0
    mass: Tensor | None = None  # [n] or [heads, n] attention the near tokens got, if units have representatives
    sinks: Pair | None = None  # the first tokens, once any token is put away
    about: Pile | None = None  # descriptions of the units put away, [1 or kv_heads, units, …]
    even: int = 0  # tokens of every unit, if all have as many
    sizes: tuple[Tensor, ...] = ()  # tokens of each unit, if not, [1 or kv_heads, units] each
    where: tuple[Tensor, ...] = ()  # where the tokens put away stood, unless in order, [1 or kv_heads, n] each
    moments: Any = None  # of all queries so far
    worth: Tensor | None = None  # [1, units] of the units to the window read last, if density matters
    density: tuple[float, int] | None = None  # mean entropy of the matches while writing, over how many steps
    fetched: Fetched | None = None

    def but(self, **changes: Any) -> Shelf:
        """`dataclasses.replace` in a fifth of its time: several times for every layer of every window."""
        twin = object.__new__(Shelf)
        twin.__dict__.update(self.__dict__, **changes)
        return twin

    @property
    def nearby(self) -> int:
        return self.near[0].shape[1]

    @property
    def first(self) -> int:
        """Where the oldest near token stands in the text."""
        return self.seen - self.nearby

    @property
    def each_size(self) -> tuple[Tensor, ...]:
        """Tokens of each unit, told one by one even where all have as many."""
        if not self.even:
            return self.sizes
        return (torch.full((1, self.host.tokens // self.even), self.even, device=self.near[0].device),)

    @property
    def device_tokens(self) -> int:
        """Tokens per key head on the device."""
        sinks = self.sinks[0].shape[1] if self.sinks else 0
        return self.nearby + sinks + (self.fetched.index.shape[1] if self.fetched else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on the device."""
        pairs = [self.near, *filter(None, [self.sinks, self.fetched and self.fetched.pair])]
        return sum(t.nbytes for pair in pairs for t in pair) + self.host.copies_nbytes

    @property
    def index_nbytes(self) -> int:
        """Bytes of what is known of tokens and units, beside them."""
        known = [self.about, *self.sizes, *self.where, self.mass, self.worth]
        return sum(t.nbytes for t in known if t is not None)

    def positions(self) -> list[list[int]]:
        """Where the tokens last attended to stood in the text, per key head, ascending."""
        near = list(range(self.first, self.seen))
        sinks = list(range(self.sinks[0].shape[1] if self.sinks else 0))
        fetched: list[list[int]] = [[]]
        if self.fetched is not None and not self.where:
            fetched = (self.fetched.index + len(sinks)).tolist()
        elif self.fetched is not None:
            where = torch.cat(self.where, 1)
            index = self.fetched.index.to(where.device).expand(max(len(where), len(self.fetched.index)), -1)
            fetched = where.expand(len(index), -1).gather(1, index).sort(1).values.tolist()
        heads = len(self.near[0])
        return [sinks + fetched[h % len(fetched)] + near for h in range(heads)]


def grown(pieces: tuple[Tensor, ...], new: Tensor) -> tuple[Tensor, ...]:
    """One piece more, joined with those no longer than it: few pieces, each number copied few times."""
    held = [*pieces, new]
    while len(held) > 1 and held[-2].shape[1] <= held[-1].shape[1]:
        held[-2:] = [torch.cat(held[-2:], 1)]
    return tuple(held)
