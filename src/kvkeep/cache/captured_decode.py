"""Decode steps of one cache in a CUDA graph: `model.generate` replays them, and launches no kernels one by one.

Tokens go into the cache's own buffers, allocated ahead. Only the device counts them: the host catches up when somebody
asks for the cache's tokens (`settle`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.backend import CacheState
from kvkeep.cache.step_pool import step_rule
from kvkeep.kernels.dispatch import append_ragged, ragged_attention
from kvkeep.model.cuda_graph import CudaGraphRunner
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter, query_heads, single_device
from kvkeep.storage.upload import upload

ROOM = 256  # tokens allocated ahead; doubled whenever they are used up
PATIENCE = 2  # tokens decoded before: a capture takes as long as some steps
WORTH = 8  # steps
DEVICES = {"cuda"}


class AppendedRows(HFCacheAdapter):
    """One token for every row is appended and attended to."""

    seen = 1  # not empty; every row has position ids of its own

    def __init__(self, cache: CacheState, room: int) -> None:
        super().__init__(cache.model)
        self.store = store = cache.backend.store
        for layer in store.values():
            layer.reserve(room)
        self.segments = {i: tuple(part.clone() for part in layer.device_segments) for i, layer in store.items()}
        self.longest = 1 << (max(max(layer.lengths) for layer in store.values()) + room - 1).bit_length()
        starts = next(iter(self.segments.values()))[0]
        self.active = torch.ones(len(starts), 1, dtype=torch.int64, device=starts.device)
        self._remember()

    @contextmanager
    def graph_capture_scratch(self, rows: int) -> Iterator[None]:
        """Within, nothing is counted."""
        self.active.zero_()
        yield
        self.active.fill_(1)

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        flat, where = self.store[index].flat, self.segments[index]
        append_ragged(flat.keys, flat.values, call.key, call.value, *where, self.active)
        return call.to_hf_output(ragged_attention(call.query, flat.keys, flat.values, *where, self.longest, *call.how))

    @property
    def is_valid(self) -> bool:
        """Nobody has changed the layers since."""
        layers = zip(self.store.values(), self.known, strict=True)
        return all(layer.flat.keys is keys and layer.lengths[0] == length for layer, (keys, length) in layers)

    def settle(self, seen: list[int], count: int) -> None:
        """Tell the layers of the tokens of the last `count` steps."""
        positions = torch.tensor([range(n - count, n) for n in map(int, seen)], dtype=torch.int32)
        for layer in self.store.values():
            layer.count_appended(upload(positions, layer.ends.device))
        self._remember()

    def _remember(self) -> None:
        self.known = [(layer.flat.keys, layer.lengths[0]) for layer in self.store.values()]


class EvictingRows(HFCacheAdapter):
    """One token of every KV head is evicted for each new one, or not yet."""

    seen = 1

    def __init__(self, cache: CacheState, room: int) -> None:
        super().__init__(cache.model)
        self.steps = cache.backend.steps
        self.rows = self.steps.enter(cache.tracker.seen, query_heads(cache.model))
        self.rows.reserve(max(self.steps.held) + room + 1)

    def graph_capture_scratch(self, rows: int) -> Any:
        """Within, nothing changes."""
        return self.rows.no_row_in_use()

    def begin_forward(self) -> None:
        self.rows.begin()

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return call.to_hf_output(self.rows.attend(index, call, self.rows.rows))

    @property
    def is_valid(self) -> bool:
        return self.steps.rows is self.rows

    def settle(self, seen: list[int], count: int) -> None:
        self.steps.count(count)


class CapturedDecode:
    """A decode step of all rows, captured, and the tokens it has decoded."""

    def __init__(self, cache: CacheState, forward: Callable[..., Any], room: int) -> None:
        model, rows = cache.model, len(cache.tracker.seen)
        self.room, self.steps, self.settled = room, 0, 0
        self.inference = torch.is_inference_mode_enabled()  # only in this mode may its tensors be changed
        self.pool = EvictingRows(cache, room) if step_rule(cache) else AppendedRows(cache, room)
        self.tokens, self.positions = torch.zeros(2, rows, 1, dtype=torch.int64, device=model.device)
        weak = weakref.proxy(self)  # the runner is ours: a cache that nobody holds is freed at once
        with self.pool.graph_capture_scratch(rows):
            self.runner = CudaGraphRunner(lambda: weak.forward(forward), model)

    def forward(self, forward: Callable[..., Any]) -> Tensor:
        return forward(self.tokens, position_ids=self.positions, past_key_values=self.pool, use_cache=True).logits

    @property
    def is_valid(self) -> bool:
        """There is room, and nobody has changed the layers since."""
        return self.steps < self.room and self.pool.is_valid

    @property
    def next_room(self) -> int:
        """The room of the graph after this one; 0: there is none."""
        if self.steps < WORTH:
            return 0
        return self.room if self.steps < self.room else 2 * self.room

    def step(self, tokens: Tensor, positions: Tensor | int) -> Tensor:
        """Logits of the next token. tokens [rows, 1] -> [rows, 1, vocabulary]"""
        self.tokens.copy_(tokens)
        self.positions.copy_(positions) if isinstance(positions, Tensor) else self.positions.fill_(positions)
        self.steps += 1
        return self.runner().clone()

    def settle(self, seen: list[int]) -> None:
        """Tell the layers of the tokens decoded since the last time. seen: tokens of each row by now"""
        count, self.settled = self.steps - self.settled, self.steps
        if count:
            with torch.inference_mode(self.inference or torch.is_inference_mode_enabled()):
                self.pool.settle(seen, count)


def can_capture(cache: CacheState) -> bool:
    """Whether its next decode steps only append, or evict one token for each, without padding, on one device."""
    method, tracker = cache.method, cache.tracker
    if cache.model.device.type not in DEVICES or tracker.attention_mask is not None:
        return False
    if not tracker.seen or min(tracker.seen) - max(tracker.prompt) < PATIENCE:
        return False
    if cache.bits or cache.shards or cache.hf_layers or cache.backend.is_dirty or cache.counts_guesses:
        return False
    if step_rule(cache):
        return single_device(cache.model) is not None
    layers = list(cache.backend.store.values())
    appends = (tracker.frozen or method.schedule.every is None) and not (method.retrieval or method.memory)
    appends = appends and all(layer.can_capture for layer in layers)
    return appends and {layer.flat.keys.device for layer in layers} == {cache.model.device}
