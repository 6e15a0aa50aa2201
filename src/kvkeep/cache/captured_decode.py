"""Decode steps of one cache in a CUDA graph: `model.generate` replays them, and launches no kernels one by one.

Tokens are appended in the cache's own buffers, allocated ahead. Only the device counts them: the host catches up when
somebody asks for the cache's tokens (`settle`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import append_ragged, ragged_attention
from kvkeep.model.cuda_graph import CudaGraphRunner
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter
from kvkeep.storage.ragged import RaggedLayer

ROOM = 256  # tokens allocated ahead; doubled whenever they are used up
PATIENCE = 2  # tokens decoded before: a capture takes as long as some steps
WORTH = 8  # steps
DEVICES = {"cuda"}


class CapturedDecode(HFCacheAdapter):
    """What the model sees while it is captured: one token for every row, appended and attended to."""

    seen = 1  # not empty; every row has position ids of its own

    def __init__(self, model: Any, store: dict[int, RaggedLayer], forward: Callable[..., Any], room: int) -> None:
        super().__init__(model)
        self.store, self.room, self.steps, self.settled = store, room, 0, 0
        for layer in store.values():
            layer.reserve(room)
        self.segments = {i: tuple(part.clone() for part in layer.device_segments) for i, layer in store.items()}
        self.longest = 1 << (max(max(layer.lengths) for layer in store.values()) + room - 1).bit_length()
        self.buffers = [(layer.flat.keys, layer.lengths[0]) for layer in store.values()]
        starts = next(iter(self.segments.values()))[0]
        self.tokens, self.positions = torch.zeros(2, len(starts), 1, dtype=torch.int64, device=starts.device)
        self.active = torch.zeros_like(self.tokens)  # while it is captured, nothing is counted
        weak = weakref.proxy(self)  # the runner is ours: a cache that nobody holds is freed at once
        self.runner = CudaGraphRunner(lambda: weak.forward(forward), model)
        self.active.fill_(1)

    def forward(self, forward: Callable[..., Any]) -> Tensor:
        return forward(self.tokens, position_ids=self.positions, past_key_values=self, use_cache=True).logits

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        flat, where = self.store[index].flat, self.segments[index]
        append_ragged(flat.keys, flat.values, call.key, call.value, *where, self.active)
        how = call.scale, call.softcap, call.sink_logits
        return call.to_hf_output(ragged_attention(call.query, flat.keys, flat.values, *where, self.longest, *how))

    @property
    def is_valid(self) -> bool:
        """There is room, and nobody has changed the layers since."""
        layers = zip(self.store.values(), self.buffers, strict=True)
        return self.steps < self.room and all(
            layer.flat.keys is keys and layer.lengths[0] == length + self.settled for layer, (keys, length) in layers
        )

    @property
    def next_room(self) -> int:
        """Of the graph after this one; 0: none."""
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
            positions = torch.tensor([range(n - count, n) for n in map(int, seen)], dtype=torch.int32)
            for layer in self.store.values():
                layer.count_appended(positions.to(layer.ends.device))


def can_capture(cache: Any) -> bool:
    """Whether its next decode steps only append, row by row without padding, on one device."""
    method, tracker, layers = cache.method, cache.tracker, list(cache.backend.store.values())
    appends = (tracker.frozen or method.schedule.every is None) and not (method.retrieval or method.memory)
    decoding = tracker.seen and min(tracker.seen) - max(tracker.prompt) >= PATIENCE and tracker.attention_mask is None
    ours = not (cache.bits or cache.shards or cache.hf_layers or cache.backend.is_dirty or cache.counts_guesses)
    return bool(appends and decoding and ours) and all(layer.can_capture for layer in layers) and _on_one(cache, layers)


def _on_one(cache: Any, layers: list[RaggedLayer]) -> bool:
    devices = {layer.flat.keys.device for layer in layers}
    return devices == {cache.model.device}
