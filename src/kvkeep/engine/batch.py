"""What a scheduler decodes with: rows of prefilled sequences, each with one token more after a step.

Here is the batch of any method and budget, whose sequences have caches of their own; pooled_batch.py has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvkeep.engine.memory import MEMORY_FRACTION, MemoryCap, free_host_bytes, row_bytes
from kvkeep.engine.packed_forward import PackedForward
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import SamplingRows, TokenLogprobs
from kvkeep.model.head_shards import agree_on_least
from kvkeep.storage.ragged import GROWTH
from kvkeep.storage.upload import upload

Decoded = tuple[Request, int, TokenLogprobs | None]  # its next token, with logprobs if it wants them


class DecodeBatch(Protocol):
    """`IndependentBatch` for `Policy.ALONE`, `RetrievalBatch` for RETRIEVE, `PooledBatch` for the others."""

    @property
    def requests(self) -> list[Request]:
        """The requests that are admitted."""

    def has_room(self, request: Request, waiting: Iterable[Request]) -> bool:
        """Whether its prefilled sequence and answer fit beside the others; raises BadInput if they would not fit alone.

        waiting: those that will be admitted next
        """

    def admit(self, request: Request) -> None:
        """Decode it from the next step on: its sequence is prefilled, its first token is sampled."""

    def release(self, request: Request) -> None:
        """Take it out, done or not."""

    def warmup(self, budget: int | float | None, rows: int, progress: Callable[[str], None]) -> None:
        """Allocate and capture for so many rows."""

    def launch(self) -> None:
        """Decode one token for every request; on a GPU, do not wait for it."""

    @property
    def replays(self) -> bool:
        """Whether `launch` replays a captured graph: that can be done in the middle of another forward pass."""

    def collect(self) -> list[Decoded]:
        """The tokens of the last step; where steps are launched ahead, of the one before. Some requests may be done."""

    def clear(self) -> None:
        """Drop all requests, whatever state a failed step has left."""


@dataclass(frozen=True)
class InflightStep:
    """A decode step running on the device: its requests, and the tokens it will have sampled."""

    requests: dict[int, Request]  # by row
    tokens: Tensor  # [rows] on the host
    logprobs: Tensor | None  # of `SamplingRows.logprobs`, on the host
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, requests: dict[int, Request], tokens: Tensor, logprobs: Tensor | None = None) -> InflightStep:
        if tokens.device.type != "cuda":
            return cls(dict(requests), tokens.clone(), logprobs, None)
        on_host = _to_host(tokens), None if logprobs is None else _to_host(logprobs)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tokens.device))
        return cls(dict(requests), *on_host, event)

    def wait(self) -> list[Decoded]:
        if self.event:
            self.event.synchronize()
        tokens, logprobs = self.tokens.tolist(), self._logprobs()
        return [(request, tokens[row], logprobs.get(row)) for row, request in self.requests.items()]

    def _logprobs(self) -> dict[int, TokenLogprobs]:
        """Give the logprobs of the rows that want them, by row."""
        if self.logprobs is None:
            return {}
        counts = {row: each.how.logprobs for row, each in sorted(self.requests.items())}
        wanted = [(row, most) for row, most in counts.items() if most is not None]
        return {row: TokenLogprobs.of(each, most) for (row, most), each in zip(wanted, self.logprobs, strict=True)}


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is complete when the device gets there."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


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
