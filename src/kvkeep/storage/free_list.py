"""Which spans of a buffer are free."""

from __future__ import annotations

from bisect import insort


class FreeList:
    """First fit; a freed span is merged with its free neighbours."""

    def __init__(self, size: int) -> None:
        self.spans = [(0, size)] if size else []  # (start, size), ascending, never touching

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
