"""Retrieval backend: nothing is evicted; every window of queries retrieves the offloaded units it scores highest.

One layer of one forward pass: tokens that left the near window are offloaded, the window's queries score the offloaded
units, the best are gathered, and one softmax goes over sinks, retrieved and near tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvkeep.cache.padding import BatchLayout
from kvkeep.cache.report import Report
from kvkeep.cache.rope_shift import RopeShift
from kvkeep.cache.self_check import AttentionCheck
from kvkeep.compress.method import Method
from kvkeep.compress.protocols import MomentsIndex
from kvkeep.compress.retrieval.config import RetrievalConfig
from kvkeep.compress.retrieval.index import (
    OffloadedTokens,
    RetrievalQuery,
    by_unit,
    select_units,
)
from kvkeep.errors import CacheMisuse
from kvkeep.kernels import dispatch
from kvkeep.kernels.dispatch import select_uniform_units, two_region_attention
from kvkeep.kernels.torch import retrieval_units
from kvkeep.kernels.torch.retrieval_units import density
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.storage.offload.host import HostMemoryBudget, HostStore, Pair
from kvkeep.storage.offload.layer_state import AppendBuffer, LayerState, Retrieved, append_merged
from kvkeep.storage.ragged import RaggedLayer
from kvkeep.types import NOTHING, Budget


@dataclass
class RetrievalBackend:
    """Offloads tokens, and retrieves. What a cache calls has the names it has in `EvictingBackend`."""

    method: Method
    budget: Budget
    layers: list[int]
    rotations: dict[int, Rotation | None]
    attention_check: AttentionCheck
    config: RetrievalConfig  # the method's
    host_budget: HostMemoryBudget
    reach = None  # retrieved keys are placed anew for every window

    def __post_init__(self) -> None:
        index = self.config.index
        self.moments = index if "moments" in index.needs and isinstance(index, MomentsIndex) else None
        self.rope_shift = RopeShift(self.rotations)
        self.store: dict[int, RaggedLayer] = {}
        self.states: dict[int, list[LayerState]] = {}  # layer -> one per row
        self.new_states: dict[int, list[LayerState]] = {}  # of the forward pass under way
        self.quota_left: dict[int, Tensor] = {}  # row -> [1] units that later layers may still retrieve in this step
        self.marks: list[Tensor] = []  # per row, one mark for each token
        self.question: dict[int, Tensor] = {}  # layer -> [x, kv_heads * dim] queries of the question
        self.peak_bytes = 0

    def attend(self, index: int, call: AttentionCall, layout: BatchLayout) -> tuple[Tensor, Tensor | None]:
        """The result of an attention function, for one layer of one forward pass."""
        before = self.states.get(index) or [self._empty(call) for _ in layout.counts]
        use_hf = not any(state.seen for state in before) and all(map(self.fits, layout.counts))
        outputs, after = [], []
        for row, state in enumerate(before):
            q, k, v = (layout.unpad(t, row).detach() for t in (call.query, call.key, call.value))
            layer = LayerRetriever(self, index, row, call, decoding=layout.counts[row] == 1 and state.seen > 0)
            with torch.no_grad():  # what is kept carries no graph
                output, state = self._row(layer, state, q, k, v, skip_output=use_hf)
            outputs.append(output)
            after.append(state)
        self.new_states[index] = after
        result = call.hf_attention() if use_hf else call.to_hf_output(self._pad(outputs, call, layout))
        self.attention_check.check(index, call, layout)
        return result

    def fits(self, count: int) -> bool:
        """Whether the model's own attention can do a first pass of this many tokens."""
        return self.config.window is None or count <= self.budget.tokens(count)

    def _empty(self, call: AttentionCall) -> LayerState:
        near = Pair(call.key, call.value).map(lambda t: t[0, :, :0].detach())
        return LayerState(near, HostStore(self.host_budget, call.key.device))

    def _row(
        self, layer: LayerRetriever, state: LayerState, q: Tensor, k: Tensor, v: Tensor, skip_output: bool
    ) -> tuple[Tensor | None, LayerState]:
        """One row's new tokens, window by window."""
        size = self.config.window or max(1, q.shape[1])
        chunk, outputs = PrefillChunk(layer, state, q, k, v), []
        for start in range(0, q.shape[1], size):
            output, state = layer.window(state, chunk, start, min(start + size, q.shape[1]), skip_output)
            if output is not None and not skip_output:
                outputs.append(output)
        budget = self.budget.tokens(state.seen)
        if state.seen > budget and not layer.decoding:
            state = layer.offload(state, chunk, budget)
            if state.device_tokens > budget:
                state = state.replace(retrieved=None)  # retrieved for a window with fewer near tokens
        if state.scores is not None:
            now = density(state.scores[0], layer.reverse).double()
            state = state.replace(scores=None, density=torch.stack([now, torch.zeros_like(now)]))
        if state.num_near < chunk.near[0].shape[1]:  # a view of a larger tensor: copy it, so that that one is freed
            state = state.replace(near=state.near.map(Tensor.clone))
        return torch.cat(outputs, 1) if len(outputs) > 1 else next(iter(outputs), None), state

    def _pad(self, outputs: list[Tensor | None], call: AttentionCall, layout: BatchLayout) -> Tensor:
        """Rows with their padding again, as zeros. [rows, heads, q, dim]"""
        if layout.token_columns is None and len(outputs) == 1 and outputs[0] is not None:
            return outputs[0][None]
        padded = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1])
        for row, output in enumerate(outputs):
            if output is not None:
                columns = slice(None) if layout.token_columns is None else layout.token_columns[row]
                padded[row, :, columns] = output
        return padded

    def set_token_marks(self, row: int, marks: Tensor, first: int | None = None) -> None:
        """Marks of the row's next tokens: how surprising each is, or whether it ends a sentence. [n]

        first: position of the first of them; marks from there on, of an interrupted pass, are replaced
        """
        while len(self.marks) <= row:
            self.marks.append(NOTHING)
        self.marks[row] = torch.cat([self.marks[row][:first], marks.detach().float().cpu()])

    def token_marks(self, row: int, first: int, count: int) -> Tensor:
        if not self.config.needs:
            return NOTHING
        marks = self.marks[row][first : first + count] if row < len(self.marks) else NOTHING
        if len(marks) < count:
            raise CacheMisuse(
                f"'{self.method.name}' chunks text by {self.config.needs}, which a cache cannot see; use kvkeep.Engine."
            )
        return marks

    def begin(self, layout: BatchLayout) -> None:
        self.new_states, self.quota_left = {}, {}
        self.rope_shift.begin()

    def commit(self) -> None:
        self.states.update(self.new_states)
        self.new_states = {}
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def settle(self) -> None:
        """Nothing waits."""

    has_history = False  # what is offloaded has an order of its own

    @property
    def is_dirty(self) -> bool:
        return bool(self.new_states)

    can_rollback = True

    def rollback(self) -> None:
        self.new_states = {}

    def select_rows(self, rows: Sequence[int]) -> None:
        self.states = {i: [states[row] for row in rows] for i, states in self.states.items()}
        self.marks = [self.marks[row] for row in rows] if self.marks else []

    def fork(self) -> RetrievalBackend:
        fork = replace(self, attention_check=self.attention_check.fork())
        fork.states = {i: list(rows) for i, rows in self.states.items()}
        fork.marks, fork.question, fork.peak_bytes = list(self.marks), dict(self.question), self.peak_bytes
        return fork

    def positions(self, layer: int) -> list[list[Tensor]]:
        return [[torch.tensor(head) for head in state.positions()] for state in self.states.get(layer, [])]

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for rows in self.states.values() for state in rows)

    def report(self, tokens_seen: Sequence[int]) -> Report:
        return Report.of_retrieval(self.method.name, self.budget.value, tokens_seen, self.states, self.peak_bytes)


class PrefillChunk:
    """The new tokens of a layer of a row, behind its near tokens. What its windows share is computed once."""

    def __init__(self, layer: LayerRetriever, state: LayerState, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.layer, self.queries, self.seen, self.first = layer, q, state.seen, state.near_start
        self.rotated: Tensor | None = None  # all queries at the edge of the near window
        # keys and values from position `first` on, [kv_heads, n, dim]
        self.near = state.near.concat(Pair(k.to(state.near.keys.dtype), v.to(state.near.values.dtype)))

    @cached_property
    def offload_keys(self) -> Tensor:
        """The near keys as they are offloaded."""
        keys, layer = self.near.keys, self.layer
        if not layer.config.moves_keys:
            return keys
        return layer.backend.rope_shift.unrotate(layer.index, keys, self.first)

    def far_queries(self, start: int, end: int, near: int) -> Tensor:
        """Queries from start to end as they attend to far keys: at the edge of a near window of this size."""
        layer = self.layer
        if not layer.config.moves_keys:
            return self.queries[:, start:end]
        if isinstance(layer.backend.budget.value, float):  # the near window grows from window to window
            return self._at_edge(start, end, near)
        if self.rotated is None:
            self.rotated = self._at_edge(0, self.queries.shape[1], near)
        return self.rotated[:, start:end]

    def _at_edge(self, start: int, end: int, near: int) -> Tensor:
        shift, index = self.layer.backend.rope_shift, self.layer.index
        return shift.rotate_to(index, self.queries[:, start:end], self.seen + start, near)


@dataclass(frozen=True)
class LayerRetriever:
    """One layer of one row in one forward pass."""

    backend: RetrievalBackend
    index: int
    row: int
    call: AttentionCall
    decoding: bool  # one token after others

    @property
    def config(self) -> RetrievalConfig:
        return self.backend.config

    def window(
        self, state: LayerState, chunk: PrefillChunk, start: int, end: int, skip_output: bool
    ) -> tuple[Tensor | None, LayerState]:
        """Attention of the queries from start to end."""
        config, q, seen = self.config, chunk.queries[:, start:end], state.seen + end - start
        budget = self.backend.budget.tokens(seen)
        sizes, far, vector = config.sizes(budget), None, None
        full_attention = config.window is None and not self.decoding
        if seen > budget and not full_attention and not self.is_frozen(state):
            state = self.offload(state, chunk, budget)
        far_queries = chunk.far_queries(start, end, sizes.near)
        if index := self.backend.moments:
            asked = index.question_in_window and not self.decoding
            question = self.backend.question.get(self.index) if asked else None
            mean, variance = state.moments or (None, None)
            given = far_queries, len(chunk.near.keys), state.seen, mean, variance, question
            weigh = partial(retrieval_units.weighted_query, reverse=True) if index.reverse else dispatch.weighted_query
            mean, variance, vector = weigh(*given)
            state = state.replace(moments=(mean, variance))
        if state.host.tokens:
            everything = state.replace(retrieved=None)
            state = everything if full_attention else self._retrieve(state, far_queries, vector, budget)

            def far() -> Pair:
                nonlocal state
                pair, state = self._gather(state)
                return pair

        begin, num_near = state.near_start - chunk.first, seen - state.near_start
        near = chunk.near.map(lambda t: t.narrow(1, begin, num_near))
        output = mass = None
        band = sizes.near if "mass" in config.index.needs else 0
        if band or not skip_output:
            far_q, call = far_queries if config.far_positions == "edge" else q, self.call
            rest = *call.how, band, state.mass, "mass_per_head" in config.index.needs
            output, mass = two_region_attention(q, far_q, far, near, *rest)
        return output, state.replace(near=near, mass=mass, seen=seen)

    def is_frozen(self, state: LayerState) -> bool:
        """`RetrievalConfig.once`: what the first decoded token retrieved stays, and so do all near tokens."""
        return self.config.once and self.decoding and state.retrieved is not None

    def offload(self, state: LayerState, chunk: PrefillChunk, budget: int) -> LayerState:
        """Offload tokens beyond the near window, in whole units.

        A decoded token, and those whose chunk fills, are within the near window: its oldest chunk leaves instead.
        """
        sizes, config = self.config.sizes(budget), self.config
        sinks = 0 if state.host.tokens else sizes.sinks
        waiting = state.num_near - sinks - (sizes.left_near if self.decoding else sizes.near)
        if waiting <= 0:
            return state
        marks = self.backend.token_marks(self.row, state.near_start + sinks, waiting)
        ready = config.chunking.num_ready(marks, waiting, budget)
        if ready <= 0:
            return state
        end, near, mass = sinks + ready, state.near, state.mass
        keys = chunk.offload_keys.narrow(1, state.near_start - chunk.first, end)
        pair = Pair(keys, near.values.narrow(1, 0, end))
        if not state.host.tokens:
            state = state.replace(sinks=pair.map(lambda t: t[:, :sinks].clone(memory_format=torch.contiguous_format)))
        given = pair.map(lambda t: t[:, sinks:]), NOTHING if mass is None else mass[..., sinks:end]
        state, pair = self._index(state, *given, marks, budget)
        return state.replace(
            near=near.map(lambda t: t.narrow(1, end, state.num_near - end)),
            mass=None if mass is None else mass[..., end:],
            host=state.host.put(*pair),
        )

    def _index(
        self, state: LayerState, pair: Pair, mass: Tensor, marks: Tensor, budget: int
    ) -> tuple[LayerState, Pair]:
        """Chunk tokens into units and add these to the index. -> also the tokens, unit after unit"""
        config, keys, n, positions = self.config, pair.keys, pair.keys.shape[1], state.offloaded_positions
        uniform = config.chunking.size(budget) if config.chunking.uniform else 0
        count, member = n // uniform if uniform else 0, None
        if not uniform:
            member = config.chunking.members(keys, marks[:n].to(keys.device), budget)
            order, size = by_unit(member)
            count = size.shape[1]
        if not config.chunking.contiguous:
            pair = pair.map(lambda t: _reorder(t, order))
            first = state.host.tokens + state.num_sinks
            new = torch.arange(first, first + n, dtype=torch.int32, device=keys.device)[order]
            positions = append_merged(positions, new)
        unit_index = self._append_units(state.unit_index, keys, mass, member, count)
        state = state.replace(unit_index=unit_index, offloaded_positions=positions)
        if uniform and uniform == (state.unit_size if state.host.tokens else uniform):
            return state.replace(unit_size=uniform), pair
        size = torch.full((1, count), uniform, device=keys.device) if uniform else size
        return state.replace(unit_size=0, unit_sizes=append_merged(state.each_unit_size, size)), pair

    def _append_units(
        self, unit_index: AppendBuffer | None, keys: Tensor, mass: Tensor, member: Tensor | None, count: int
    ) -> AppendBuffer | None:
        """The index with the entries of `count` more units."""
        buffer = unit_index.grow(count) if unit_index else None
        out = buffer.last(count) if buffer else None
        new = self.config.index.build(OffloadedTokens(keys, mass, member, count, out))
        if new is None or new is out:
            return buffer
        buffer = buffer or AppendBuffer.empty_like(new, keys.dtype).grow(count)
        buffer.last(count).copy_(new)
        return buffer

    def _gather(self, state: LayerState) -> tuple[Pair, LayerState]:
        """Sinks and retrieved tokens, or all offloaded ones, at the positions where they are attended to."""
        sinks, first, chosen = state.sinks, state.num_sinks, state.retrieved
        if chosen is None:
            far = sinks.concat(state.host.gather_all())
        elif chosen.pair:
            far = sinks.concat(chosen.pair)
        else:
            far = state.host.gather(chosen.index, self._unit, sinks)
            pair = far.map(lambda t: t.narrow(1, first, t.shape[1] - first))
            state = state.replace(retrieved=Retrieved(chosen.query, chosen.index, pair))
        if self.config.far_positions != "contiguous":
            return far, state
        keys = self.backend.rope_shift.rotate(self.index, far.keys, state.near_start - far.keys.shape[1])
        return Pair(keys, far.values), state

    @property
    def _unit(self) -> int:
        """Tokens of every unit, where a budget in tokens makes them uniform; else 1."""
        budget = self.backend.budget.value
        return self.config.chunking.uniform_size(budget) if isinstance(budget, int) else 1

    def _retrieve(self, state: LayerState, queries: Tensor, vector: Tensor | None, budget: int) -> LayerState:
        """Select units for the window's queries; vector: their one query vector, where it is known."""
        if self.is_frozen(state):
            return state
        config, last, question = self.config, state.retrieved, self.backend.question.get(self.index)
        query = RetrievalQuery(queries, len(state.near.keys), self.call.scale, question, vector)
        quota, asked = self._quota(state, budget), None
        if config.similar is not None:
            asked = query.vector
            before = last.query if last and self.decoding and last.index.shape[1] <= quota else None
            if before is not None and float(cosine_similarity(asked, before, 0)) >= config.similar:
                return state
        unit_index = state.unit_index.all if state.unit_index else state.host.keys()
        uniform = state.unit_size and "sizes" not in config.index.needs and not config.neighbours
        scores = config.index.score(query, unit_index, None if uniform else torch.cat(state.each_unit_size, 1))
        if config.density:
            state, quota = self._share(state, scores, quota, budget)
        if uniform and quota % state.unit_size == 0:
            index = select_uniform_units(scores, state.unit_size, quota)
        else:
            sizes = torch.cat(state.each_unit_size, 1).expand(len(scores), -1)
            index = select_units(scores, sizes, quota, config.neighbours).index
        can_compare = self.decoding or index.device.type == "cpu"  # it synchronizes with a GPU, in vain during prefill
        pair = last.pair if last and can_compare and index.equal(last.index) else None
        return state.replace(retrieved=Retrieved(asked, index, pair))

    def _quota(self, state: LayerState, budget: int) -> int:
        """Tokens the budget leaves for retrieval beside sinks and near tokens, in whole units where they are uniform.

        The tokens of a window attend to so many others. The near window of a decoded token has room for it.
        """
        near = max(self.config.sizes(budget).near, state.num_near + 1) if self.decoding else state.num_near
        left = max(0, budget - state.num_sinks - near)
        unit = self.config.chunking.uniform_size(budget)
        return left // unit * unit

    def _share(self, state: LayerState, scores: Tensor, quota: int, budget: int) -> tuple[LayerState, int]:
        """While decoding, layers share the quota of all of them; ActQKV's information density."""
        if not self.decoding:
            return state.replace(scores=scores), quota
        backend, unit, device = self.backend, self.config.chunking.uniform_size(budget), scores.device
        layers, everything = backend.layers, len(backend.layers) * quota // unit
        left = backend.quota_left.get(self.row, torch.tensor([everything])).to(device)
        known = torch.stack([backend.states[i][self.row].density.to(device) for i in layers])[None]
        units, number = torch.tensor([scores.shape[1]], device=device), layers.index(self.index)
        given = scores, units, left, known, number, everything
        divide = partial(retrieval_units.share_quota, reverse=True) if self.reverse else dispatch.share_quota
        share = divide(*given)
        backend.quota_left[self.row] = left
        return state.replace(density=known[0, number]), int(share) * unit

    @property
    def reverse(self) -> bool:
        return self.config.density == "reverse"


def _reorder(tokens: Tensor, order: Tensor) -> Tensor:
    """tokens [kv_heads, n, dim] by order [1 or kv_heads, n]"""
    return tokens.gather(1, order.expand(len(tokens), -1)[..., None].expand_as(tokens))
