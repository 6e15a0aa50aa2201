"""One layer of a pool of retrieval caches: one token for every row, in tensors whose shapes never change.

As in cache/retrieval.py, for all rows at once and with every count on the device: nothing waits for the host, so that a
step can be captured in a CUDA graph. A row's near tokens and those it decodes lie in one buffer. Tokens
that leave the near window stay where they are, their keys unrotated, and are retrieved from there like those in host
memory; `take` offloads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvkeep.cache.retrieval import RetrievalBackend
from kvkeep.cache.rope_shift import RopeShift, is_whole
from kvkeep.compress.protocols import RowIndex
from kvkeep.compress.retrieval.config import RetrievalConfig, Sizes
from kvkeep.compress.retrieval.index import OffloadedTokens, RowQueries
from kvkeep.kernels.dispatch import append_ragged, mean_queries, select_counted, share_quota, slotted_attention
from kvkeep.kernels.torch.retrieval_units import unit_tokens
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.storage.offload.host import HostStore, Pair
from kvkeep.storage.offload.layer_state import AppendBuffer, LayerState, Retrieved
from kvkeep.storage.offload.unit_slots import UnitShape, UnitSlots
from kvkeep.types import NOTHING


@dataclass(frozen=True)
class RetrievalPlan:
    """What all rows of a pool have in common: method, budget and shapes."""

    config: RetrievalConfig
    budget: int
    heads: int
    layers: tuple[int, ...]
    shape: UnitShape
    entry: tuple[int, ...]  # shape of an index entry, behind its heads: [1 or kv_heads, units, …]
    entry_heads: int
    rope_shift: RopeShift

    @classmethod
    def of(cls, backend: RetrievalBackend, heads: int) -> RetrievalPlan | None:
        """None where a pool cannot do what the method does."""
        config, budget, near = backend.config, backend.budget.value, next(iter(backend.states.values()))[0].near
        scores_rows = isinstance(config.index, RowIndex) and config.chunking.uniform and config.chunking.contiguous
        if not scores_rows or config.once or config.neighbours or isinstance(budget, float):
            return None
        if config.density == "reverse" or (config.density and not getattr(config.index, "cosine", False)):
            return None  # a layer's share has no bound
        (kv_heads, _, dim), dtype = near.keys.shape, near.keys.dtype
        if config.far_positions == "contiguous" and not all(is_whole(r, dim) for r in backend.rotations.values() if r):
            return None
        sizes = config.sizes(budget)
        blank = near.keys.new_zeros(kv_heads, sizes.unit, dim)
        mass = blank.new_zeros((heads, sizes.unit) if "mass_per_head" in config.index.needs else (sizes.unit,)).float()
        entry = config.index.build(OffloadedTokens(blank, mass, None, 1))
        lists = 1 if entry is None else len(entry)
        entry = blank[:, :1] if entry is None else entry
        most = max(1, (budget - sizes.sinks - sizes.near) // sizes.unit)
        shape = UnitShape(
            sizes.unit, sizes.sinks, most * (2 if config.density else 1), lists, kv_heads, dim,
            near.values.shape[-1], dtype,
        )  # fmt: skip
        layers = tuple(backend.layers)
        return cls(config, budget, heads, layers, shape, entry.shape[2:], len(entry), RopeShift(backend.rotations))

    @property
    def sizes(self) -> Sizes:
        return self.config.sizes(self.budget)

    @property
    def index(self) -> RowIndex:
        assert isinstance(self.config.index, RowIndex)
        return self.config.index

    @property
    def quota_limit(self) -> int:
        """Tokens a layer may retrieve, were there no other near tokens."""
        return max(1, self.budget - self.sizes.sinks - self.sizes.near)

    def needs(self, what: str) -> bool:
        return what in self.config.index.needs


class RowSizes(NamedTuple):
    """The most of a row."""

    near: int  # tokens in the near buffer: near tokens, and all that are decoded
    units: int
    blocks: int  # in host memory, and one on the device
    slots: int  # units on the device

    def max(self, other: RowSizes) -> RowSizes:
        return RowSizes(*map(max, self, other))


@dataclass
class RowStep:
    """A decode step: what its layers share, for the first rows of the pool. Counts are [rows]."""

    active: Tensor  # [rows, 1] 1 where the row is in use
    begin: Tensor  # slot of the oldest near token
    units: Tensor  # offloaded; 0 in rows that are not in use
    position: Tensor  # of the new token
    back: Tensor  # -position
    edge: Tensor  # position from which far keys are seen
    near_start: Tensor  # position of the oldest near token
    weight: Tensor  # of the new token among all, 0 in rows that are not in use
    quota: Tensor  # units that the budget leaves to a layer
    count: Tensor  # units that a layer retrieves, where all layers retrieve as many
    num_far: Tensor  # tokens of these, and sinks
    left: Tensor  # units that later layers may still retrieve, where layers share


class RetrievalRows:
    """One layer's buffers. Row by row, `put` and `take` convert a `LayerState`."""

    def __init__(
        self, plan: RetrievalPlan, index: int, rows: int, sizes: RowSizes, device: torch.device, densities: Tensor
    ) -> None:
        """densities: [rows, layers, 2] mean and number of steps, of all layers; NaN: not known"""
        self.plan, self.index, self.sizes, self.device = plan, index, sizes, device
        self.densities, self.density = densities, densities[:, plan.layers.index(index)]
        shape, width = plan.shape, plan.shape.kv_heads * plan.shape.dim
        self.units = UnitSlots(shape, rows, sizes.units, sizes.blocks, sizes.slots, device)

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(rows, *size, dtype=dtype, device=device)

        near = shape.kv_heads, sizes.near
        self.near = Pair(zeros(*near, shape.dim, dtype=shape.dtype), zeros(*near, shape.v_dim, dtype=shape.dtype))
        self.lengths = zeros(shape.kv_heads, dtype=torch.int64)  # of the near buffer
        self.starts = torch.arange(0, rows * shape.kv_heads * sizes.near, sizes.near, device=device).view(rows, -1)
        self.entries = zeros(plan.entry_heads, sizes.units, *plan.entry, dtype=shape.dtype)
        per_head = plan.heads if plan.needs("mass_per_head") else 1
        self.mass = zeros(per_head, sizes.near) if plan.needs("mass") else None
        self.selected, self.count = zeros(shape.lists, shape.most, dtype=torch.int32), zeros(dtype=torch.int64)
        self.question = zeros(width)
        self.moments = zeros(2, width)  # mean and variance
        self.query, self.has_query = zeros(width), zeros(dtype=torch.bool)  # they were retrieved for

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that belongs to rows, but for the fetched units."""
        counts = self.lengths, self.selected, self.count, self.question, self.moments, self.query, self.has_query
        mass = () if self.mass is None else (self.mass,)
        return (*self.near, *counts, *mass, self.entries)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.tensors, *self.units.tensors))

    # a row comes and goes

    def put(self, row: int, state: LayerState, question: Tensor | None) -> None:
        """A row of the pool; its sinks are the first near tokens until some token is offloaded."""
        plan, n, unit = self.plan, state.num_near, self.plan.shape.unit
        for part in self.tensors:
            part[row] = 0
        for target, part in zip(self.near, state.near, strict=True):
            target[row, :, :n] = part
        self.lengths[row], self.density[row] = n, state.density
        if self.mass is not None and state.mass is not None:
            self.mass[row, :, :n] = state.mass
        if state.moments is not None:
            self.moments[row] = torch.stack(state.moments)
        if question is not None:
            self.question[row] = question.mean(0)
        if state.host.tokens:
            self._put_offloaded(row, state)
        self.units.admit(row, state.host, *self._tail(row, state.host))
        if state.retrieved is not None and state.retrieved.query is not None and plan.config.similar is not None:
            chosen = state.retrieved.index[:, ::unit] // unit
            self.selected[row, :, : chosen.shape[1]], self.count[row] = chosen, chosen.shape[1]
            self.query[row], self.has_query[row] = state.retrieved.query, True

    def _tail(self, row: int, host: HostStore) -> tuple[Pair, Tensor | None]:
        """Where the tokens lie that will be offloaded next; and all offloaded keys, if they are the index."""
        tail = self.near.map(lambda t: t[row, :, 0 if host.tokens else self.plan.shape.sinks :])
        return tail, self.entries[row] if self.plan.needs("keys") else None

    def copy_rows(self, before: RetrievalRows) -> None:
        """All rows of a smaller pool."""
        for new, old in zip(self.tensors, before.tensors, strict=True):
            new[tuple(map(slice, old.shape))] = old
        self.units.copy_rows(before.units)
        for row, host in enumerate(before.units.hosts):
            if host is not None:
                self.units.point(row, host, *self._tail(row, host))

    def _put_offloaded(self, row: int, state: LayerState) -> None:
        self.units.put_sinks(row, state.sinks)
        if state.unit_index:
            self.entries[row, :, : state.unit_index.count] = state.unit_index.all
        else:
            keys = state.host.keys()
            self.entries[row, :, : state.host.tokens] = torch.cat([each.to(self.device) for each in keys], 1)

    def begin_offloading(self, row: int) -> None:
        """The first near tokens become the sinks, without their rotation."""
        sinks = self.plan.shape.sinks
        keys, values = self.near.map(lambda t: t[row, :, :sinks])
        if self.plan.config.moves_keys:
            keys = self.plan.rope_shift.unrotate(self.index, keys, 0)
        self.units.put_sinks(row, Pair(keys, values))

    def take(self, row: int, state: LayerState, seen: int, begin: int, units: int) -> LayerState:
        """The row as a state, after the decoded tokens: what is offloaded only in name now goes to host memory."""
        plan, unit, sinks = self.plan, self.plan.shape.unit, self.plan.shape.sinks
        end = seen - state.near_start
        near = self.near.map(lambda t: t[row, :, begin:end].clone())
        mass = None if self.mass is None else self.mass[row, :, begin:end].clone()
        mass = mass if mass is None or plan.needs("mass_per_head") else mass[0]
        moments = state.moments and tuple(self.moments[row].clone())
        state = state.replace(near=near, mass=mass, moments=moments, seen=seen, scores=None, retrieved=None)
        if not units:
            return state
        if new := units * unit - state.host.tokens:
            tail = self.near.map(lambda t: t[row, :, begin - new : begin])
            state = state.replace(host=state.host.put(*tail), unit_size=unit)
        if not plan.needs("keys"):
            state = state.replace(unit_index=self._index(row, state.unit_index, units))
        state = state.replace(sinks=self.units.pair.map(lambda t: t[row, :, :sinks].clone()))
        return state.replace(density=self.density[row].clone(), retrieved=self._retrieved(row, state.host))

    def _index(self, row: int, index: AppendBuffer | None, units: int) -> AppendBuffer:
        """A row's index, longer by the units that left the near window since, one after the other."""
        index = index or AppendBuffer.empty_like(self.entries[row], self.entries.dtype)
        for number in range(index.count, units):
            index = index.grow(1)
            index.last(1).copy_(self.entries[row, :, number : number + 1])
        return index

    def _retrieved(self, row: int, host: HostStore) -> Retrieved:
        unit, count = self.plan.shape.unit, int(self.count[row])
        index = unit_tokens(self.selected[row, :, :count].long(), unit)
        query = self.query[row].clone() if self.plan.config.similar is not None else None
        return Retrieved(query, index, host.gather(index, unit))

    # a decode step

    def attend(self, call: AttentionCall, step: RowStep) -> Tensor:
        """[rows, heads, 1, dim]"""
        plan, rows, query = self.plan, len(step.begin), call.query[:, :, 0]
        near, lengths = self.near.map(lambda t: t[:rows]), self.lengths[:rows]
        flat = near.map(lambda t: t.view(-1, t.shape[-1]))
        append_ragged(*flat, call.key, call.value, self.starts[:rows], lengths, step.active)
        edge = self._move(query, step.back, step.edge)
        num_far = self._retrieve(edge, call.scale, step)
        angles, far_query = None, query if plan.config.far_positions == "original" else edge
        if plan.config.far_positions == "contiguous" and plan.rope_shift.rotations.get(self.index):
            angles = plan.rope_shift.angles_from_zero(self.index, self.units.pair.keys[0, :, : self._longest])
            far_query = self._move(query, step.back, step.position - step.near_start + num_far)
        slots = self.units.slots[:rows] if self.units.by_device else None  # else in order
        output = slotted_attention(
            query, far_query, self.units.pair.map(lambda t: t[:rows]), slots, num_far, near,
            step.begin, lengths[:, 0], plan.shape.sinks, plan.shape.unit, *call.how,
            angles, None if self.mass is None else self.mass[:rows], plan.sizes.near, step.active[:, 0],
        )  # fmt: skip
        return output[:, :, None]

    @property
    def _longest(self) -> int:
        return self.plan.shape.sinks + self.plan.shape.most * self.plan.shape.unit

    def _move(self, query: Tensor, *by: Tensor) -> Tensor:
        """Queries [rows, heads, dim] moved by positions [rows], one after the other."""
        if not self.plan.config.moves_keys:
            return query
        return self.plan.rope_shift.move(self.index, query.transpose(0, 1), *by).transpose(0, 1)

    def _retrieve(self, queries: Tensor, scale: float, step: RowStep) -> Tensor:
        """Select units and bring them to their slots. -> far tokens of each row, sinks included [rows]"""
        plan, rows, units, count = self.plan, len(step.begin), step.units, step.count
        moments = self.moments[:rows] if plan.needs("moments") else None
        vectors = mean_queries(queries, plan.shape.kv_heads, moments, step.weight)
        if plan.config.similar is not None:
            units = self._without_similar(vectors, step)
        asked = RowQueries(queries.contiguous(), vectors, scale, self.question[:rows], units)
        scores = plan.index.score_rows(asked, self.entries[:rows])
        if plan.config.density:
            layer, most = plan.layers.index(self.index), plan.shape.most
            count = torch.minimum(
                share_quota(scores[:, 0], units, step.left, self.densities[:rows], layer, most), units
            )
        torch.where(units > 0, count, self.count[:rows], out=self.count[:rows])
        select_counted(scores, units, count, self.selected[:rows])
        if plan.config.similar is None and not plan.config.density:
            self.units.fetch(self.selected[:rows], step.count, step.position)
            return step.num_far
        fetched = torch.where(step.units > 0, self.count[:rows], 0)
        self.units.fetch(self.selected[:rows], fetched, step.position)
        return torch.where(step.units > 0, plan.shape.sinks + fetched * plan.shape.unit, 0)

    def _without_similar(self, vectors: Tensor, step: RowStep) -> Tensor:
        """Units to choose from: none where the query is like the last one, and what was retrieved still fits."""
        rows = len(vectors)
        query, has_query, count = self.query[:rows], self.has_query[:rows], self.count[:rows]
        similar = cosine_similarity(vectors, query, 1) >= (self.plan.config.similar or 0.0)
        same = has_query & similar & (count <= step.quota)
        units = torch.where(same, 0, step.units)
        torch.where((units > 0)[:, None], vectors, query, out=query)
        has_query.logical_or_(units > 0)
        return units

    # between decode steps

    def offload(self, ready: Tensor, place: Tensor, back: Tensor, units: Tensor) -> None:
        """The next unit of rows that are ready [rows] leaves the near window: its keys unrotated, its entry made.

        place [rows, unit]: its slots; back [rows * unit]: minus its positions
        """
        plan, (unit, rows) = self.plan, (self.plan.shape.unit, len(ready))
        at = place[:, None, :, None].expand(-1, plan.shape.kv_heads, -1, plan.shape.dim)
        near = self.near.keys.gather(2, at)
        keys = near.transpose(0, 1).flatten(1, 2)  # [kv_heads, rows * unit, dim]: one unit for each row
        if plan.config.moves_keys:
            keys = plan.rope_shift.move(self.index, keys, back)
            moved = keys.unflatten(1, (rows, unit)).transpose(0, 1)
            self.near.keys.scatter_(2, at, torch.where(ready[:, None, None, None], moved, near))
        mass = NOTHING
        if self.mass is not None:
            mass = self.mass.gather(2, place[:, None].expand(-1, self.mass.shape[1], -1)).transpose(0, 1).flatten(1)
            mass = mass if plan.needs("mass_per_head") else mass[0]
        entry = plan.config.index.build(OffloadedTokens(keys, mass, None, rows))
        entry = (keys if entry is None else entry).transpose(0, 1).to(self.entries.dtype)
        where = torch.arange(rows, device=units.device), units.clamp_max(self.sizes.units - 1)
        entries = self.entries.transpose(1, 2)  # [rows, units, heads, …]
        mask = ready.view(-1, *[1] * (entry.dim() - 1))
        entries[where] = torch.where(mask, entry, entries[where])
