"""A preallocated pool for many sequences of one retrieval method and budget, decoded one token at a time.

A decode step selects, fetches and attends for all rows with counts that only the device knows, so that it can be
captured in a CUDA graph (cache/retrieval_rows.py). Between two steps, complete units leave the near window; the host
counts along, and so knows when that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.cache.decode.policy import retrieval_plan
from kvkeep.cache.decode.retrieval_rows import RetrievalRows, RowSizes, RowStep
from kvkeep.cache.decode.runner import DecodePool
from kvkeep.cache.retrieval import RetrievalBackend
from kvkeep.errors import CacheMisuse
from kvkeep.model.cuda_graph import CudaGraphRunner
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import execution_device
from kvkeep.storage.offload.layer_state import LayerState
from kvkeep.storage.rows import restored
from kvkeep.storage.upload import upload


@dataclass
class Row:
    """What the host knows of a row. Slot s of its near buffer has the token at position base + s."""

    base: int
    begin: int  # slot of the oldest near token
    end: int
    units: int  # offloaded, in name at least


def backend_of(cache: Cache) -> RetrievalBackend:
    assert isinstance(cache.backend, RetrievalBackend)
    return cache.backend


class RetrievalPool(DecodePool):
    """A cache of many rows of any lengths."""

    def __init__(self, like: Cache) -> None:
        """like: a cache such as those it is for"""
        super().__init__(like.model)
        plan = retrieval_plan(like)
        assert plan is not None
        self.plan, self.device = plan, execution_device(like.model)
        self.sizes, self.rows = RowSizes(1, 1, 1, 1), 0
        self.by_row: dict[int, Row] = {}
        self.step: RowStep | None = None  # the one under way
        self.rows_of: dict[int, RetrievalRows] = {}  # by layer
        self._allocate()

    def _allocate(self) -> None:
        """Counters, with those of the rows there were."""
        before = getattr(self, "counts", None)
        self.counts = torch.zeros(5, self.rows, dtype=torch.int64, device=self.device)
        self.densities = torch.zeros(self.rows, len(self.plan.layers), 2, dtype=torch.float64, device=self.device)
        if before is not None:
            self.counts[:, : before.shape[1]] = before
        self.base, self.begin, self.units, self.started, active = self.counts
        self.active = active[:, None]  # 1 where the row is in use
        self.offloader: CudaGraphRunner | None = None

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.rows_of.values())

    # the size of the pool

    def sizes_for(self, cache: Cache, room: int) -> RowSizes:
        """Sizes of a row for this cache and `room` more tokens."""
        state, unit = backend_of(cache).states[self.plan.layers[0]][0], self.plan.shape.unit
        near, units = state.num_near + room + unit, (state.seen + room) // unit + 1
        return RowSizes(near, units, len(state.host.blocks) + 1, self.plan.shape.most)

    def row_bytes(self, sizes: RowSizes) -> int:
        """On the device, in all layers."""
        meta = torch.device("meta")
        layer = RetrievalRows(self.plan, self.plan.layers[0], 1, sizes, meta, self.densities[:1].to(meta))
        return layer.nbytes * len(self.plan.layers)

    def fits(self, cache: Cache, room: int) -> bool:
        return len(self.by_row) < self.rows and self.sizes.max(self.sizes_for(cache, room)) == self.sizes

    def grow(self, rows: int, sizes: RowSizes) -> bool:
        """Make room for more rows and larger ones, layer by layer; slots may become fewer. -> whether it changed"""
        larger = self.sizes.max(sizes)._replace(slots=sizes.slots)
        if larger == self.sizes and rows <= self.rows:
            return False
        self.sizes, self.rows, densities = larger, max(rows, self.rows), self.densities
        self._allocate()
        self.densities[: len(densities)] = densities
        for i in self.plan.layers:
            layer = RetrievalRows(self.plan, i, self.rows, larger, self.device, self.densities)
            if before := self.rows_of.get(i):
                layer.copy_rows(before)
            self.rows_of[i] = layer
        return True

    # a row comes and goes

    def admit(self, row: int, cache: Cache, room: int) -> None:
        """Copy a cache of one row; its offloaded tokens stay where they are."""
        if row in self.by_row:
            raise CacheMisuse(f"row {row} is in use.")
        backend, unit = backend_of(cache), self.plan.shape.unit
        for i, layer in self.rows_of.items():
            state: LayerState = backend.states[i][0]
            layer.put(row, state, backend.question.get(i))
        units = state.host.tokens // unit
        self.by_row[row] = Row(state.near_start, 0, state.num_near, units)
        numbers = [state.near_start, 0, units, int(units > 0), 1]
        self.counts[:, row] = upload(numbers, self.device)

    def complete(self, row: int, cache: Cache, count: int) -> None:
        """Bring the cache of an admitted row to what it is after `count` decoded tokens."""
        here, states = self.by_row[row], backend_of(cache).states
        seen = here.base + here.end
        assert seen == cache.seen + count
        for i, layer in self.rows_of.items():
            states[i] = [layer.take(row, states[i][0], seen, here.begin, here.units)]
        cache.append_decoded(count)

    def release(self, row: int) -> None:
        self.by_row.pop(row, None)
        self.counts[:, row] = 0
        for layer in self.rows_of.values():
            layer.lengths[row] = 0
            layer.units.release(row)

    # decode

    def begin_step(self) -> bool:
        """In rows beyond the budget, every complete unit leaves the near window, and the new token has room there."""
        near, unit, rounds = self.plan.sizes.left_near, self.plan.shape.unit, 0
        for number, row in self.by_row.items():
            if row.base + row.end < self.plan.budget:
                continue
            if not row.units:
                self._begin_offloading(number, row)
            ready = max(0, row.end - row.begin - near) // unit
            row.begin, row.units, rounds = row.begin + ready * unit, row.units + ready, max(rounds, ready)
        for _ in range(rounds):
            with torch.inference_mode():
                self.capture_offloader()()
        for row in self.by_row.values():
            row.end += 1
        return False

    def _begin_offloading(self, number: int, row: Row) -> None:
        row.begin = self.plan.shape.sinks
        self.begin[number], self.started[number] = row.begin, 1
        for layer in self.rows_of.values():
            layer.begin_offloading(number)

    def capture_offloader(self) -> CudaGraphRunner:
        if self.offloader is None:
            with torch.inference_mode(), self.graph_capture_scratch():
                self.offloader = CudaGraphRunner(self._offload_units, self.model)
        return self.offloader

    def _offload_units(self) -> Tensor:
        """One unit of every row that has one; which these are, the device knows."""
        unit, near = self.plan.shape.unit, self.plan.sizes.left_near
        length = self.rows_of[self.plan.layers[0]].lengths[:, 0]
        ready = (length - self.begin >= near + unit) & (self.started * self.active[:, 0] > 0)
        first = self.begin.clamp_max(self.sizes.near - unit)[:, None]
        place = first + torch.arange(unit, device=self.device)
        back = -(self.base[:, None] + place).flatten()
        self.plan.rope_shift.begin()
        for layer in self.rows_of.values():
            layer.offload(ready, place, back, self.units)
        self.begin.add_(ready * unit)
        return self.units.add_(ready)

    @contextmanager
    def graph_capture_scratch(self) -> Iterator[None]:
        """Within, forward passes change nothing: no row is in use."""
        with restored([self.active]):
            self.active.zero_()
            yield

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """One token for every row."""
        if index == self.plan.layers[0]:
            self.step = self._begin_layers(len(call.query))
        assert self.step is not None
        return call.to_hf_output(self.rows_of[index].attend(call, self.step))

    def _begin_layers(self, rows: int) -> RowStep:
        plan, unit = self.plan, self.plan.shape.unit
        base, begin, units, _, active = self.counts[:, :rows]
        length = self.rows_of[plan.layers[0]].lengths[:rows, 0].clone()  # layers count the new token themselves
        units, position, near = units * active, base + length, (length - begin + 1).clamp_min(plan.sizes.near)
        quota = (plan.budget - plan.shape.sinks - near).clamp_min(0) // unit
        count = torch.minimum(quota, units)
        edge, weight = torch.full_like(position, plan.sizes.near), (active.double() / (position + 1)).float()
        num_far = torch.where(units > 0, plan.shape.sinks + count * unit, 0)
        plan.rope_shift.begin()
        rest = base + begin, weight, quota, count, num_far, len(plan.layers) * quota
        return RowStep(self.active[:rows], begin, units, position, -position, edge, *rest)
