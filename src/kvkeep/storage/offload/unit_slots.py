"""One layer's fetched units, for all rows of a pool: slots on the device, refilled from host memory.

With a GPU, the device itself finds which of the selected units are not there, and reads them; the host waits for
nothing. On a CPU, each row's units are gathered in the order they were selected, unless they are the same as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import fetch_units
from kvkeep.kernels.torch.retrieval_units import unit_tokens
from kvkeep.storage.offload.host import HostBlock, HostStore, Pair


@dataclass(frozen=True)
class UnitShape:
    """What a pool retrieves in every layer."""

    unit: int  # tokens
    sinks: int
    most: int  # units that a step selects
    lists: int  # selections: 1, or one per KV head
    kv_heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype


class UnitSlots:
    def __init__(self, shape: UnitShape, rows: int, units: int, blocks: int, slots: int, device: torch.device) -> None:
        """units, blocks: the most of a row, offloaded before it was admitted and since; slots: shape.most or more"""
        self.shape, self.device, lists = shape, device, (rows, shape.lists)
        size = rows, shape.kv_heads, shape.sinks + slots * shape.unit
        self.pair = Pair(*(torch.zeros(*size, d, dtype=shape.dtype, device=device) for d in (shape.dim, shape.v_dim)))

        def none(*size: int) -> Tensor:
            return torch.full((*lists, *size), -1, dtype=torch.int32, device=device)

        self.slots = none(shape.most)  # of the units selected last
        self.slot_of, self.unit_of, self.used, self.hand = none(units), none(slots), none(slots), none() + 1
        self.table = torch.zeros(rows, 5, blocks, dtype=torch.int64, device=device)
        self.blocks = torch.zeros(rows, dtype=torch.int64, device=device)
        self.hosts: list[HostStore | None] = [None] * rows
        self.stores: list[HostStore | None] = [None] * rows  # those and, as one block more, what is offloaded since
        self.last: list[Tensor | None] = [None] * rows  # on a CPU: what was gathered
        self.by_device = device.type == "cuda"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held of each row."""
        maps = self.slots, self.slot_of, self.unit_of, self.used, self.hand, self.table, self.blocks
        return (*self.pair, *maps)

    def copy_rows(self, before: UnitSlots) -> None:
        """Copy the rows of other slots; where their number differs, all units are fetched again."""
        if before.unit_of.shape[2] == self.unit_of.shape[2]:
            for new, old in zip(self.tensors, before.tensors, strict=True):
                new[tuple(map(slice, old.shape))] = old
        else:
            for new, old in zip(self.pair, before.pair, strict=True):
                new[: len(old), :, : self.shape.sinks] = old[:, :, : self.shape.sinks]

    def admit(self, row: int, host: HostStore, tail: Pair, index: Tensor | None) -> None:
        """A row with these tokens offloaded, and behind them those that will lie in `tail`, on the device.

        tail: keys and values [kv_heads, n, dim]; index [kv_heads, tokens, dim]: all offloaded keys, where they are
        on the device anyway
        """
        for part in (self.slot_of, self.unit_of, self.used):
            part[row] = -1
        self.point(row, host, tail, index)

    def put_sinks(self, row: int, sinks: Pair) -> None:
        for target, part in zip(self.pair, sinks, strict=True):
            target[row, :, : part.shape[1]] = part

    def point(self, row: int, host: HostStore, tail: Pair, index: Tensor | None) -> None:
        """Where the row's tokens lie."""
        self.hosts[row], self.last[row] = host, None
        self.stores[row] = HostStore(
            host.host_budget, host.device, (*host.blocks, HostBlock(*tail)), None, None, host.tokens + tail[0].shape[1]
        )
        if self.by_device:
            self._enter(row, host, tail, index)

    def _enter(self, row: int, host: HostStore, tail: Pair, index: Tensor | None) -> None:
        """The row's part of the table; see kernels/triton/host_gather.py."""
        n, table = len(host.blocks), self.table[row]
        if n:
            assert host.table is not None
            addresses, ends = host.table.entries[:2, :n], host.table.entries[2, :n]
            starts = torch.cat([ends.new_zeros(1), ends[:-1]])
            for line, part in enumerate(tail):
                table[line, :n] = addresses[line] - starts * part.shape[-1] * part.element_size()
            table[2:4, :n], table[4, :n] = ends - starts, ends
        for line, part in enumerate(tail):
            table[line, n] = part.data_ptr() - host.tokens * part.shape[-1] * part.element_size()
            table[2 + line, n] = part.stride(0) // part.shape[-1]
        table[4, n] = host.tokens + tail[0].shape[1]
        if index is not None:
            table[0, : n + 1], table[2, : n + 1] = index.data_ptr(), index.stride(0) // index.shape[-1]
        self.blocks[row] = n + 1

    def release(self, row: int) -> None:
        self.hosts[row] = self.stores[row] = self.last[row] = None

    def fetch(self, selected: Tensor, counts: Tensor, now: Tensor) -> None:
        """Bring the first rows' units to their slots. Shapes as in kernels/triton/host_gather.py"""
        if self.by_device:
            fetch_units(*self.arguments(selected, counts, now))
            return
        for row, count in enumerate(counts.tolist()):
            if count:
                self._gather(row, selected[row, :, :count].long())

    def arguments(self, selected: Tensor, counts: Tensor, now: Tensor) -> tuple[Any, ...]:
        rows = len(selected)
        maps = (part[:rows] for part in (self.slot_of, self.unit_of, self.used, self.hand, self.slots))
        pair = self.pair.map(lambda t: t[:rows])
        return (selected, counts, now, *maps, self.table, self.blocks, pair, self.shape.sinks, self.shape.unit)

    def _gather(self, row: int, units: Tensor) -> None:
        last, store, unit, sinks = self.last[row], self.stores[row], self.shape.unit, self.shape.sinks
        if store is None or (last is not None and last.equal(units)):
            return
        self.last[row] = units
        index = unit_tokens(units, unit)
        for target, part in zip(self.pair, store.gather(index, unit), strict=True):
            target[row, :, sinks : sinks + index.shape[1]] = part
