"""LRU cache on the device of units retrieved from the host. Copies run on a stream of their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pair(NamedTuple):
    keys: Tensor
    values: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Pair:
        return Pair(change(self.keys), change(self.values))

    def concat(self, other: Pair) -> Pair:
        """Other tokens behind these. [kv_heads, n, dim]"""
        return Pair(torch.cat([self.keys, other.keys], 1), torch.cat([self.values, other.values], 1))


class DeviceLRU:
    """Holds twice as many units as the last request had; the least recently used are evicted first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: OrderedDict[Hashable, Pair] = OrderedDict()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for pair in self.held.values() for t in pair)

    def get(self, units: Sequence[Any], size: int, read: Callable[[Any], Pair]) -> Pair:
        """The units side by side, [kv_heads, units * size, dim]; read: loads one from the host, by its name"""
        missing = [unit for unit in units if unit not in self.held]
        if missing:
            for unit, pair in zip(missing, self._copy_to_device([read(unit) for unit in missing], size), strict=True):
                self.held[unit] = pair
        for unit in units:
            self.held.move_to_end(unit)
        joined = Pair(*(torch.cat(same, 1) for same in zip(*(self.held[unit] for unit in units), strict=True)))
        while len(self.held) > 2 * len(units):
            self.held.popitem(last=False)
        return joined

    def _copy_to_device(self, pairs: list[Pair], size: int) -> list[Pair]:
        """Each in memory of its own."""
        on_host = [torch.cat(same, 1) for same in zip(*pairs, strict=True)]
        if self.stream is None:
            copied = [t.to(self.device) for t in on_host]
        else:
            on_host = [t.pin_memory() for t in on_host]
            with torch.cuda.stream(self.stream):
                copied = [t.to(self.device, non_blocking=True) for t in on_host]
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            for t in copied:
                t.record_stream(current)
        each = [t.split(size, 1) for t in copied]
        return [Pair(k.clone(), v.clone()) for k, v in zip(*each, strict=True)]
