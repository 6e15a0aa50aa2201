"""Decode steps of one cache in a CUDA graph: `model.generate` replays them, and launches no kernels one by one.

Tokens go into the cache's own buffers, allocated ahead. Only the device counts them: the host catches up when somebody
asks for the cache's tokens (`settle`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache_state import CacheState
from kvkeep.cache.decode.evict_one import EvictOneRows
from kvkeep.cache.decode.policy import Policy, evict_one_rule
from kvkeep.cache.decode.runner import DecodeRows, Runner
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import query_heads, single_device
from kvkeep.storage.places import Places
from kvkeep.storage.rows import attend_step
from kvkeep.storage.upload import upload

ROOM = 256  # tokens allocated ahead; doubled whenever they are used up
DECODED_BEFORE = 2  # tokens: a capture takes as long as some steps
WORTH = 8  # steps of a graph, for another to be captured
DEVICES = {"cuda"}


class AppendedRows(DecodeRows):
    """Rows of a cache's own buffers, which are only appended to."""

    def __init__(self, cache: CacheState, room: int) -> None:
        super().__init__(cache.model)
        self.store = store = cache.backend.store
        for layer in store.values():
            layer.reserve(room)
        self.active = torch.ones_like(next(iter(store.values())).places.active)
        known = {i: layer.places for i, layer in store.items()}
        self.places = {i: Places(each.starts, each.lengths.clone(), self.active) for i, each in known.items()}
        self.longest = 1 << (max(max(layer.lengths) for layer in store.values()) + room - 1).bit_length()
        self._remember()

    @contextmanager
    def graph_capture_scratch(self) -> Iterator[None]:
        self.active.zero_()
        yield
        self.active.fill_(1)

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        flat, step = self.store[index].flat, (call.query, call.key, call.value)
        return call.to_hf_output(
            attend_step(flat.keys, flat.values, *step, self.places[index], self.longest, *call.how)
        )

    @property
    def is_valid(self) -> bool:
        """Nobody has changed the layers since."""
        layers = zip(self.store.values(), self.known, strict=True)
        return all(layer.places is places and layer.lengths[0] == length for layer, (places, length) in layers)

    def settle(self, seen: list[int], count: int) -> None:
        """Tell the layers of the tokens of the last `count` steps."""
        positions = torch.tensor([range(n - count, n) for n in map(int, seen)], dtype=torch.int32)
        for layer in self.store.values():
            layer.count_appended(upload(positions, layer.flat.token_positions.device))
        self._remember()

    def _remember(self) -> None:
        self.known = [(layer.places, layer.lengths[0]) for layer in self.store.values()]


class EvictingRows(EvictOneRows):
    """Rows of a cache, of which one token of every KV head is evicted for each new one, or not yet."""

    def __init__(self, cache: CacheState, room: int) -> None:
        self.of_cache = cache.backend.steps
        super().__init__(cache.model, self.of_cache.enter(cache.tracker.seen, query_heads(cache.model)))
        self.steps.reserve(max(self.of_cache.held) + room + 1)

    @property
    def is_valid(self) -> bool:
        return self.of_cache.rows is self.steps

    def settle(self, seen: list[int], count: int) -> None:
        self.of_cache.count(count)


class CapturedDecode:
    """A decode step of all rows of a cache, captured, and how many were made."""

    def __init__(self, cache: CacheState, forward: Callable[..., Any], room: int) -> None:
        self.room, self.steps, self.settled, self.rows = room, 0, 0, len(cache.tracker.seen)
        self.inference = torch.is_inference_mode_enabled()  # only in this mode may its tensors be changed
        self.pool = EvictingRows(cache, room) if evict_one_rule(cache) else AppendedRows(cache, room)
        self.runner = Runner(self.pool, self.rows, forward)
        self.runner.prepare(self.rows)

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
        runner = self.runner
        runner.tokens.copy_(tokens)
        runner.positions.copy_(positions) if isinstance(positions, Tensor) else runner.positions.fill_(positions)
        self.steps += 1
        return runner(self.rows)[:, None].clone()

    def settle(self, seen: list[int]) -> None:
        """Tell the layers of the tokens decoded since the last time. seen: tokens of each row by now"""
        count, self.settled = self.steps - self.settled, self.steps
        if count:
            with torch.inference_mode(self.inference or torch.is_inference_mode_enabled()):
                self.pool.settle(seen, count)


def can_capture(cache: CacheState) -> bool:
    """Whether its next decode steps only append, or evict one token for each, without padding, on one device."""
    tracker = cache.tracker
    if cache.model.device.type not in DEVICES or tracker.attention_mask is not None:
        return False
    if not tracker.seen or min(tracker.seen) - max(tracker.prompt) < DECODED_BEFORE:
        return False
    if cache.bits or cache.shards or cache.hf_layers or cache.backend.is_dirty or cache.counts_guesses:
        return False
    if evict_one_rule(cache):
        return single_device(cache.model) is not None
    layers = list(cache.backend.store.values())
    appends = Policy.of(cache) is Policy.APPEND and not cache.method.memory
    appends = appends and all(layer.can_capture for layer in layers)
    return appends and {layer.flat.keys.device for layer in layers} == {cache.model.device}
