"""Keys and values put away in host memory: exactly once, in slabs that are never changed, so that copies share them.

On a GPU machine slabs are pinned, and the device itself writes and reads them in the order of its stream: nobody waits
for it before a processor wants to look. With a folder, slabs beyond the memory limit are written to disk and read from
there (memory-mapped); then a processor fetches, on a stream of its own, and what was fetched last stays on the device.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from kvkeep.errors import StoreFull
from kvkeep.storage.offload.device_lru import Copies, Pair
from kvkeep.storage.offload.disk import Spill
from kvkeep.storage.offload.pinned import Arena, Table


class Purse:
    """Host memory that all layers of a cache share: so many bytes, and no more."""

    def __init__(self, limit: int | None = None, spill: Spill | None = None) -> None:
        self.limit, self.spill, self.spent = limit, spill, 0
        self.arenas: dict[torch.device, Arena] = {}

    def arena(self, device: torch.device) -> Arena:
        """Pinned memory, for a GPU."""
        if device not in self.arenas:
            self.arenas[device] = Arena(device, self.limit)
        return self.arenas[device]

    def take(self, size: int) -> bool:
        """Pay for a slab; False where it has to go to disk."""
        if self.limit is not None and self.spent + size > self.limit:
            if self.spill is not None:
                return False
            raise StoreFull(
                f"put-away tokens would take {self.spent + size:,} bytes of host memory, and the limit is "
                f"{self.limit:,}; raise host_limit, or give disk= a folder to spill to. What was read is still there."
            )
        self.spent += size
        return True

    def give_back(self, size: int) -> None:
        """Nobody holds a slab any more."""
        self.spent -= size


@dataclass(frozen=True, eq=False)
class Slab:
    """Tokens put away together. keys, values [kv_heads, n, dim] on the host (or mapped from a file)"""

    keys: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]


Name = tuple[int, int, Slab]


class Host:
    """One layer of one row: everything put away, in the order it was."""

    def __init__(
        self,
        purse: Purse,
        device: torch.device,
        slabs: tuple[Slab, ...] = (),
        copies: Copies | None = None,
        table: Table | None = None,
        tokens: int = 0,
        nbytes: int = 0,
    ) -> None:
        self.purse, self.device, self.slabs, self.copies = purse, device, slabs, copies
        self.tokens, self.nbytes = tokens, nbytes  # everything, wherever it lies
        # where the device finds the slabs; None where it cannot, or not all of them
        self.table = table or (None if slabs else Table.new(device))

    @cached_property
    def ends(self) -> list[int]:
        return list(accumulate(slab.tokens for slab in self.slabs))

    def put(self, keys: Tensor, values: Tensor) -> Host:
        """The same store with more in it; this one stays as it is. keys, values [kv_heads, n, dim]"""
        pair = (keys.detach(), values.detach())
        size, tokens = keys.nbytes + values.nbytes, self.tokens + keys.shape[1]
        if self.purse.take(size):
            try:
                slab, table = self._home(pair, tokens)
            except BaseException:
                self.purse.give_back(size)
                raise
            weakref.finalize(slab, self.purse.give_back, size)
        else:
            slab, table = Slab(*self.purse.spill.write(*(t.cpu() for t in pair))), None
            self.purse.spill.goes_with(slab)
        return Host(self.purse, self.device, (*self.slabs, slab), self.copies, table, tokens, self.nbytes + size)

    def _home(self, pair: Pair, end: int) -> tuple[Slab, Table | None]:
        """A copy in host memory, and the table that knows it; on its way while a GPU has other work."""
        if self.device.type != "cuda" and self.table is None:
            return Slab(*(torch.empty(t.shape, dtype=t.dtype).copy_(t) for t in pair)), None
        pair = tuple(t if t.stride(-1) == 1 else t.contiguous() for t in pair)
        slab = Slab(*(self.purse.arena(self.device).take(t.shape, t.dtype) for t in pair))
        table = self.table and self.table.put(*pair, (slab.keys, slab.values), len(self.slabs), end)
        if table is None:
            for room, tensor in zip((slab.keys, slab.values), pair, strict=True):
                room.copy_(tensor, non_blocking=True)
        return slab, table

    @property
    def copies_nbytes(self) -> int:
        return self.copies.nbytes if self.copies else 0

    def keys(self) -> list[Tensor]:
        """Of all slabs, [kv_heads, n, dim] each, for a processor to read."""
        self._settle()
        return [slab.keys for slab in self.slabs]

    def _settle(self) -> None:
        """Wait for what is still on its way home."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fetch(self, index: Tensor, unit: int = 1, front: Pair | None = None) -> Pair:
        """Tokens by number, ascending, [1 or kv_heads, k] -> keys and values [kv_heads, k, dim] on the device

        unit: tokens come in whole blocks of so many, which may stay on the device for the next time
        front: keys and values [kv_heads, f, dim] that stand before them -> [kv_heads, f + k, dim]
        """
        first = (self.slabs[0].keys, self.slabs[0].values)
        if not index.shape[1]:
            return front or tuple(t[:, :0].to(self.device) for t in first)
        if self.table and (pair := self.table.fetch(index, len(self.slabs), first, front)):
            return pair
        pair = self._read(index, unit)
        return tuple(torch.cat(both, 1) for both in zip(front, pair, strict=True)) if front else pair

    def _read(self, index: Tensor, unit: int) -> Pair:
        """`fetch` by a processor."""
        self._settle()
        if self.copies is None and self.device.type != "cpu":  # a CPU needs none
            self.copies = Copies(self.device)
        if self.copies and unit > 1 and len(index) == 1:
            firsts = index[0, ::unit].tolist()
            return self.copies.get([self._name(first, unit) for first in firsts], unit, self._block)
        if self.device.type == "cpu" and len(self.slabs) == 1:
            return self._gathered(self.slabs[0], index)
        if len(index) == 1:
            return self._runs(index[0].tolist())
        heads = [self._runs(row, slice(h, h + 1)) for h, row in enumerate(index.tolist())]
        return tuple(torch.cat(same) for same in zip(*heads, strict=True))

    def _name(self, first: int, unit: int) -> Name:
        """A block, and the slab its last token is in: stores that share this slab share all that came before it."""
        return first, unit, self.slabs[bisect_right(self.ends, first + unit - 1)]

    def _block(self, name: Name) -> Pair:
        first, unit, _ = name
        return self._runs(list(range(first, first + unit)), at_home=True)

    def everything(self) -> Pair:
        self._settle()
        return tuple(
            torch.cat([getattr(slab, part) for slab in self.slabs], 1).to(self.device) for part in ("keys", "values")
        )

    def _gathered(self, slab: Slab, index: Tensor) -> Pair:
        index = index.expand(len(slab.keys), -1)[..., None]
        return tuple(t.gather(1, index.expand(-1, -1, t.shape[-1])) for t in (slab.keys, slab.values))

    def _runs(self, numbers: list[int], heads: slice = slice(None), at_home: bool = False) -> Pair:
        """Stretches of neighbouring tokens, copied as they lie; at_home: not to the device yet."""
        pieces: tuple[list[Tensor], list[Tensor]] = ([], [])
        for first, last in runs(numbers):
            while first < last:
                slab = bisect_right(self.ends, first)
                before = self.ends[slab - 1] if slab else 0
                stop = min(last, self.ends[slab])
                for part, into in zip((self.slabs[slab].keys, self.slabs[slab].values), pieces, strict=True):
                    into.append(part[heads, first - before : stop - before])
                first = stop
        home = [torch.cat(part, 1) for part in pieces]
        return tuple(home if at_home else [t.to(self.device) for t in home])


def runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as stretches [first, last). 3 4 5 9 -> (3, 6) (9, 10)"""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return [(first, last) for first, last in found]
