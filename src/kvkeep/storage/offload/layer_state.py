"""One layer of one row of a retrieval cache: near tokens on the device, all others offloaded.

States are immutable. Every forward pass makes new ones, so an interrupted pass has changed nothing, and forks of a
cache share tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.storage.offload.host import HostStore, Pair

UNKNOWN = torch.tensor([torch.nan, 0.0], dtype=torch.float64)
NO_SINKS = Pair(torch.empty(0, 0, 0), torch.empty(0, 0, 0))


class AppendBuffer:
    """A tensor that only grows, in a buffer with room. Immutable: a shorter one shares the buffer of a longer one."""

    def __init__(self, buffer: Tensor, count: int, filled: list[int]) -> None:
        self.buffer, self.count, self.filled = buffer, count, filled  # filled: by the longest that shares it

    @classmethod
    def empty_like(cls, new: Tensor, dtype: torch.dtype) -> AppendBuffer:
        return cls(new[:, :0].to(dtype), 0, [0])

    def grow(self, new: int) -> AppendBuffer:
        """Longer by `new`, uninitialized: the caller fills `last(new)`."""
        end, buffer, filled = self.count + new, self.buffer, self.filled
        if filled[0] != self.count or end > buffer.shape[1]:
            shape = buffer.shape[0], max(32, end + end // 4), *buffer.shape[2:]
            with torch.inference_mode(False):  # it outlives the forward pass
                buffer, filled = torch.empty(shape, dtype=buffer.dtype, device=buffer.device), [0]
            buffer.narrow(1, 0, self.count).copy_(self.all)
        filled[0] = end
        return AppendBuffer(buffer, end, filled)

    def last(self, count: int) -> Tensor:
        return self.buffer.narrow(1, self.count - count, count)

    @property
    def all(self) -> Tensor:
        return self.buffer.narrow(1, 0, self.count).contiguous()

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes


@dataclass(frozen=True)
class Retrieved:
    """The tokens retrieved last, still on the device."""

    query: Tensor | None  # the pooled query they were retrieved for
    index: Tensor  # [1 or kv_heads, k] numbers of the offloaded tokens
    pair: Pair | None  # keys and values [kv_heads, k, dim]; None until they are gathered


@dataclass(frozen=True)
class LayerState:
    near: Pair  # keys as the model made them and values, [kv_heads, n, dim]: the newest tokens, contiguous
    host: HostStore
    seen: int = 0
    mass: Tensor | None = None  # [n] or [heads, n] attention the near tokens got, if units have representatives
    sinks: Pair = NO_SINKS  # the first tokens, once any token is offloaded
    unit_index: AppendBuffer | None = None  # index entries of the offloaded units, [1 or kv_heads, units, …]
    unit_size: int = 0  # tokens of every unit, if uniform
    unit_sizes: tuple[Tensor, ...] = ()  # tokens of each unit, if not, [1 or kv_heads, units] each
    offloaded_positions: tuple[Tensor, ...] = ()  # of the offloaded tokens, if units are scattered, [1 or kv_heads, n]
    moments: tuple[Tensor, Tensor] | None = None  # mean and variance of all queries so far, [kv_heads * dim] each
    scores: Tensor | None = None  # [1, units] of the units for a pass's last window, until it ends, for their density
    density: Tensor = UNKNOWN  # [2] mean of the scores' density, over how many decode steps; 0: of the prefill's end
    retrieved: Retrieved | None = None

    def replace(self, **changes: Any) -> LayerState:
        """`dataclasses.replace` in a fifth of its time: several calls for every layer of every window."""
        changed = object.__new__(LayerState)
        changed.__dict__.update(self.__dict__, **changes)
        return changed

    @property
    def num_near(self) -> int:
        return self.near[0].shape[1]

    @property
    def num_sinks(self) -> int:
        return self.sinks[0].shape[1]

    @property
    def near_start(self) -> int:
        """Position of the oldest near token."""
        return self.seen - self.num_near

    @property
    def each_unit_size(self) -> tuple[Tensor, ...]:
        """Tokens of each unit, one by one even where sizes are uniform."""
        if not self.unit_size:
            return self.unit_sizes
        return (torch.full((1, self.host.tokens // self.unit_size), self.unit_size, device=self.near[0].device),)

    @property
    def device_tokens(self) -> int:
        """Tokens per KV head on the device."""
        return self.num_near + self.num_sinks + (self.retrieved.index.shape[1] if self.retrieved else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on the device."""
        held = self.near, self.sinks, self.retrieved and self.retrieved.pair
        return sum(t.nbytes for pair in held if pair for t in pair) + self.host.device_nbytes

    @property
    def index_nbytes(self) -> int:
        """Bytes stored about tokens and units, besides keys and values."""
        stored = [self.unit_index, *self.unit_sizes, *self.offloaded_positions, self.mass, self.scores]
        return sum(t.nbytes for t in stored if t is not None)

    def positions(self) -> list[list[int]]:
        """Positions of the tokens last attended to, per KV head, ascending."""
        near = list(range(self.near_start, self.seen))
        sinks = list(range(self.num_sinks))
        far: list[list[int]] = [[]]
        if self.retrieved is not None and not self.offloaded_positions:
            far = (self.retrieved.index + len(sinks)).tolist()
        elif self.retrieved is not None:
            offloaded = torch.cat(self.offloaded_positions, 1)
            index = self.retrieved.index.to(offloaded.device)
            index = index.expand(max(len(offloaded), len(index)), -1)
            far = offloaded.expand(len(index), -1).gather(1, index).sort(1).values.tolist()
        heads = len(self.near[0])
        return [sinks + far[h % len(far)] + near for h in range(heads)]


def append_merged(pieces: tuple[Tensor, ...], new: Tensor) -> tuple[Tensor, ...]:
    """One piece more, concatenated with those no longer than it: few pieces, each number copied few times."""
    held = [*pieces, new]
    while len(held) > 1 and held[-2].shape[1] <= held[-1].shape[1]:
        held[-2:] = [torch.cat(held[-2:], 1)]
    return tuple(held)
