"""Blocks of put-away tokens that stay on the device: those asked for last. Copies travel on a stream of their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class Copies:
    """As many blocks as twice the last request; who was asked for longest ago goes first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: OrderedDict[Hashable, Pair] = OrderedDict()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for pair in self.held.values() for t in pair)

    def get(self, blocks: Sequence[Any], size: int, read: Callable[[Any], Pair]) -> Pair:
        """The blocks side by side, [kv_heads, blocks * size, dim]; read: one of them from the host, by name"""
        missing = [block for block in blocks if block not in self.held]
        if missing:
            for block, pair in zip(missing, self._fetched([read(block) for block in missing], size), strict=True):
                self.held[block] = pair
        for block in blocks:
            self.held.move_to_end(block)
        together = tuple(torch.cat(same, 1) for same in zip(*(self.held[block] for block in blocks), strict=True))
        while len(self.held) > 2 * len(blocks):
            self.held.popitem(last=False)
        return together

    def _fetched(self, pairs: list[Pair], size: int) -> list[Pair]:
        """On the device, each in memory of its own."""
        travelling = [torch.cat(same, 1) for same in zip(*pairs, strict=True)]
        if self.stream is None:
            arrived = [t.to(self.device) for t in travelling]
        else:
            travelling = [t.pin_memory() for t in travelling]
            with torch.cuda.stream(self.stream):
                arrived = [t.to(self.device, non_blocking=True) for t in travelling]
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self.stream)
            for t in arrived:
                t.record_stream(here)
        each = [t.split(size, 1) for t in arrived]
        return [(k.clone(), v.clone()) for k, v in zip(*each, strict=True)]
