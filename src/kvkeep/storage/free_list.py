"""Which stretches of a buffer are free."""

from __future__ import annotations

from bisect import insort


class Stretches:
    """First fit; neighbours that are given back grow together again."""

    def __init__(self, size: int) -> None:
        self.free = [(0, size)] if size else []  # (start, size), ascending, never touching

    @property
    def largest(self) -> int:
        return max((size for _, size in self.free), default=0)

    def take(self, size: int) -> int:
        """-> where a stretch of this size begins"""
        for number, (start, room) in enumerate(self.free):
            if room >= size:
                self.free[number : number + 1] = [(start + size, room - size)] if room > size else []
                return start
        raise MemoryError(f"no stretch of {size} slots is free; the largest has {self.largest}.")

    def give_back(self, start: int, size: int) -> None:
        insort(self.free, (start, size))
        merged: list[tuple[int, int]] = []
        for first, room in self.free:
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((first, room))
        self.free = merged
