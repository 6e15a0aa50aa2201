"""Where tokens lie in a buffer: those of every row and KV head, and the free spans between them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.storage.upload import upload


@dataclass
class Places:
    """The segments of every row and KV head, on the device, where decode steps count them."""

    starts: Tensor  # [rows, kv_heads]
    lengths: Tensor  # [rows, kv_heads]
    active: Tensor  # [rows, 1] 1 where the row is in use

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int], rows: int, device: torch.device) -> Places:
        """Rows that are all in use, as the host knows them."""
        first, counts = upload([starts, lengths], device).unflatten(1, (rows, -1))
        return cls(first, counts, torch.ones_like(counts[:, :1]))

    def first(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.starts[:rows], self.lengths[:rows], self.active[:rows]

    def free(self, count: int) -> Tensor:
        """The first free slots of every segment. [rows * kv_heads * count]"""
        ends = (self.starts + self.lengths).flatten()
        return ends if count == 1 else (ends[:, None] + torch.arange(count, device=ends.device)).flatten()


class FreeList:
    """The free spans of a buffer: the first that fits is taken, and a freed one is merged with its free neighbours."""

    def __init__(self, size: int) -> None:
        self.spans = [(0, size)] if size else []  # (start, size), ascending, never touching

    @property
    def size(self) -> int:
        return sum(size for _, size in self.spans)

    @property
    def largest(self) -> int:
        return max((size for _, size in self.spans), default=0)

    def allocate(self, size: int) -> int:
        """-> start of a span of this size"""
        for number, (start, room) in enumerate(self.spans):
            if room >= size:
                self.spans[number : number + 1] = [(start + size, room - size)] if room > size else []
                return start
        raise MemoryError(f"no span of {size} slots is free; the largest has {self.largest}.")

    def free(self, start: int, size: int) -> None:
        insort(self.spans, (start, size))
        merged: list[tuple[int, int]] = []
        for first, room in self.spans:
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((first, room))
        self.spans = merged
