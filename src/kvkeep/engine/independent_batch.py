"""Decoding sequences that have caches of their own: any method, any budget, one forward pass for a token of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kvkeep.engine.memory import MEMORY_FRACTION, MemoryCap, free_host_bytes, row_bytes
from kvkeep.engine.packed_forward import PackedForward
from kvkeep.engine.pooled_batch import Decoded, InflightStep
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import SamplingRows
from kvkeep.model.head_shards import agree_on_least
from kvkeep.storage.ragged import GROWTH
from kvkeep.storage.upload import upload


class IndependentBatch:
    """Decodes each request as it would be alone, up to rounding."""

    def __init__(self, model: Any, max_rows: int, memory: MemoryCap | None = None) -> None:
        self.model, self.max_rows, self.memory = model, max_rows, memory
        self.forward = PackedForward(model)
        self.admitted: list[Request] = []
        self.decoded: list[Decoded] = []

    @property
    def requests(self) -> list[Request]:
        return list(self.admitted)

    def has_room(self, request: Request, waiting: Iterable[Request]) -> bool:
        fits = self.memory is None or self._growth(request) <= self.memory.left
        return len(self.requests) < self.max_rows and fits

    def _growth(self, request: Request) -> int:
        """Bytes of its answer, and of a cache's room for more."""
        tokens = request.expected_tokens
        return row_bytes(self.model, request.how.max_new_tokens + tokens // GROWTH)

    def admit(self, request: Request) -> None:
        request.reserved = request.own_bytes + self._growth(request)
        self.admitted.append(request)

    def release(self, request: Request) -> None:
        self.admitted.remove(request)

    def warmup(self, *_: Any) -> None:
        """Nothing is captured."""

    def launch(self) -> None:
        chunks = [(request.sequence, torch.tensor(request.answer.ids[-1:])) for request in self.requests]
        logits = torch.cat(self.forward(chunks))
        positions = upload([sequence.cache.seen for sequence, _ in chunks], logits.device)
        hows, edits = zip(*((request.how, request.edit) for request in self.requests), strict=True)
        rows = SamplingRows.of(hows, logits.device, edits)
        requests = dict(enumerate(self.requests))
        allowed = {row: each.allowed() for row, each in requests.items() if each.how.constraint}
        tokens = rows.sample(logits, positions, allowed)
        self.decoded = InflightStep.of(requests, tokens, rows.logprobs(logits, tokens)).wait()

    replays = False

    def collect(self) -> list[Decoded]:
        decoded, self.decoded = self.decoded, []
        return decoded

    def clear(self) -> None:
        self.admitted, self.decoded = [], []


def fits_host(request: Request) -> bool:
    """Whether a retrieval method's tokens fit into host memory; where host_limit is set, that is the limit."""
    config = request.config
    unlimited = config.method.retrieval and config.cache_options.get("host_limit") is None
    free = free_host_bytes() if unlimited else None
    size = row_bytes(config.model, len(request.ids) + request.how.max_new_tokens)
    return bool(agree_on_least(config.model, free is None or size <= MEMORY_FRACTION * free))
