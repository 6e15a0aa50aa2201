"""Keys and values offloaded to host memory: once, in immutable blocks, so that forks of a cache share them.

With a GPU, blocks are pinned, and the device itself writes and reads them in stream order; the CPU synchronizes only
before it reads a block. With a folder, blocks beyond the memory limit are memory-mapped files; then the CPU retrieves,
on a stream of its own, and the units retrieved last stay on the device.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from kvkeep.arguments import Bytes, check_value
from kvkeep.errors import StoreFull
from kvkeep.storage.offload.device_lru import DeviceLRU, Pair
from kvkeep.storage.offload.disk import DiskStore
from kvkeep.storage.offload.pinned import Arena, HostBlockTable


class HostMemoryBudget:
    """Limit on the host memory that all layers of a cache use together."""

    def __init__(self, limit: int | None = None, disk: DiskStore | None = None) -> None:
        check_value("host_limit", limit, Bytes | None)
        self.limit, self.disk, self.used_bytes = limit, disk, 0
        self.arenas: dict[torch.device, Arena] = {}

    def arena(self, device: torch.device) -> Arena:
        """Pinned memory of a GPU."""
        if device not in self.arenas:
            self.arenas[device] = Arena(device, self.limit)
        return self.arenas[device]

    def reserve(self, size: int) -> DiskStore | None:
        """Count a block's bytes. -> the disk, where it has to go there"""
        if self.limit is not None and self.used_bytes + size > self.limit:
            if self.disk is not None:
                return self.disk
            raise StoreFull(
                f"offloaded tokens would take {self.used_bytes + size:,} bytes of host memory, and the limit is "
                f"{self.limit:,}; raise host_limit, or give disk= a folder to spill to. Tokens seen so far are kept."
            )
        self.used_bytes += size
        return None

    def release(self, size: int) -> None:
        """A block was garbage-collected."""
        self.used_bytes -= size


@dataclass(frozen=True, eq=False)
class HostBlock:
    """Tokens offloaded together. keys, values [kv_heads, n, dim] on the host (or mapped from a file)"""

    keys: Tensor
    values: Tensor

    @property
    def pair(self) -> Pair:
        return Pair(self.keys, self.values)

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]


UnitName = tuple[int, int, HostBlock]


@dataclass(eq=False)
class HostStore:
    """One layer of one row: all offloaded tokens, in the order they were offloaded."""

    host_budget: HostMemoryBudget
    device: torch.device
    blocks: tuple[HostBlock, ...] = ()
    device_lru: DeviceLRU | None = None
    table: HostBlockTable | None = None  # where the device finds the blocks; None where it cannot read all of them
    tokens: int = 0
    nbytes: int = 0  # on the host and on disk

    def __post_init__(self) -> None:
        if self.table is None and not self.blocks:
            self.table = HostBlockTable.new(self.device)

    @cached_property
    def ends(self) -> list[int]:
        return list(accumulate(block.tokens for block in self.blocks))

    def put(self, keys: Tensor, values: Tensor) -> HostStore:
        """A store with these tokens appended; this one is unchanged. keys, values [kv_heads, n, dim]"""
        pair, budget = Pair(keys.detach(), values.detach()), self.host_budget
        size, tokens = keys.nbytes + values.nbytes, self.tokens + keys.shape[1]
        if disk := budget.reserve(size):
            block, table = HostBlock(*disk.write(*(t.cpu() for t in pair))), None
            disk.delete_last_with(block)
        else:
            try:
                block, table = self._copy_to_host(pair, tokens)
            except BaseException:
                budget.release(size)
                raise
            weakref.finalize(block, budget.release, size)
        blocks, nbytes = (*self.blocks, block), self.nbytes + size
        return HostStore(budget, self.device, blocks, self.device_lru, table, tokens, nbytes)

    def _copy_to_host(self, pair: Pair, end: int) -> tuple[HostBlock, HostBlockTable | None]:
        """A copy in host memory, and the table that has it; on a GPU the copy is asynchronous."""
        if self.device.type != "cuda" and self.table is None:
            return HostBlock(*(torch.empty(t.shape, dtype=t.dtype).copy_(t) for t in pair)), None
        pair = pair.map(lambda t: t if t.stride(-1) == 1 else t.contiguous())
        block = HostBlock(*(self.host_budget.arena(self.device).allocate(t.shape, t.dtype) for t in pair))
        table = self.table and self.table.put(*pair, block.pair, len(self.blocks), end)
        if table is None:
            for target, tensor in zip(block.pair, pair, strict=True):
                target.copy_(tensor, non_blocking=True)
        return block, table

    @property
    def device_nbytes(self) -> int:
        return self.device_lru.nbytes if self.device_lru else 0

    def keys(self) -> list[Tensor]:
        """The keys of all blocks, [kv_heads, n, dim] each, readable by the CPU."""
        self._synchronize()
        return [block.keys for block in self.blocks]

    def _synchronize(self) -> None:
        """Wait for copies to the host that are under way."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, index: Tensor, unit: int = 1, prefix: Pair | None = None) -> Pair:
        """Tokens by number, ascending, [1 or kv_heads, k] -> keys and values [kv_heads, k, dim] on the device

        unit: the tokens are whole units of this size, which may be cached on the device
        prefix: keys and values [kv_heads, f, dim] put before them -> [kv_heads, f + k, dim]
        """
        first = self.blocks[0].pair
        if not index.shape[1]:
            return prefix or first.map(lambda t: t[:, :0].to(self.device))
        if self.table and (pair := self.table.gather(index, len(self.blocks), first, prefix)):
            return pair
        pair = self._gather_on_cpu(index, unit)
        return prefix.concat(pair) if prefix else pair

    def _gather_on_cpu(self, index: Tensor, unit: int) -> Pair:
        self._synchronize()
        if self.device_lru is None and self.device.type != "cpu":  # useless on a CPU
            self.device_lru = DeviceLRU(self.device)
        if self.device_lru and unit > 1 and len(index) == 1:
            names = [self._unit_name(first, unit) for first in index[0, ::unit].tolist()]
            return self.device_lru.get(names, unit, self._read_unit)
        if self.device.type == "cpu" and len(self.blocks) == 1:
            return self._gather_block(self.blocks[0], index)
        if len(index) == 1:
            return self._gather_runs(index[0].tolist())
        heads = [self._gather_runs(row, slice(h, h + 1)) for h, row in enumerate(index.tolist())]
        return Pair(*(torch.cat(same) for same in zip(*heads, strict=True)))

    def _unit_name(self, first: int, unit: int) -> UnitName:
        """A unit, and the block of its last token: stores that share this block share all blocks before it."""
        return first, unit, self.blocks[bisect_right(self.ends, first + unit - 1)]

    def _read_unit(self, name: UnitName) -> Pair:
        first, unit, _ = name
        return self._gather_runs(list(range(first, first + unit)), on_host=True)

    def gather_all(self) -> Pair:
        """Block by block straight to the device, which has written them itself: the host waits for nothing."""
        parts = zip(*(block.pair for block in self.blocks), strict=True)
        return Pair(*(self._join(same) for same in parts))

    def _join(self, parts: tuple[Tensor, ...]) -> Tensor:
        heads, _, dim = parts[0].shape
        joined = torch.empty(heads, self.tokens, dim, dtype=parts[0].dtype, device=self.device)
        for target, part in zip(joined.split([part.shape[1] for part in parts], 1), parts, strict=True):
            target.copy_(part, non_blocking=True)
        return joined

    def _gather_block(self, block: HostBlock, index: Tensor) -> Pair:
        index = index.expand(len(block.keys), -1)[..., None]
        return block.pair.map(lambda t: t.gather(1, index.expand(-1, -1, t.shape[-1])))

    def _gather_runs(self, numbers: list[int], heads: slice = slice(None), on_host: bool = False) -> Pair:
        """Runs of neighbouring tokens as slices; on_host: not copied to the device."""
        pieces: tuple[list[Tensor], list[Tensor]] = ([], [])
        for first, last in runs(numbers):
            while first < last:
                block = bisect_right(self.ends, first)
                before = self.ends[block - 1] if block else 0
                stop = min(last, self.ends[block])
                for part, into in zip(self.blocks[block].pair, pieces, strict=True):
                    into.append(part[heads, first - before : stop - before])
                first = stop
        joined = [torch.cat(part, 1) for part in pieces]
        return Pair(*(joined if on_host else [t.to(self.device) for t in joined]))


def runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs [first, last). 3 4 5 9 -> (3, 6) (9, 10)"""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return [(first, last) for first, last in found]
