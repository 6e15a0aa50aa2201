"""What a scheduler decodes with: rows of prefilled sequences, each with one token more after a step.

Here is the batch of any method and budget, whose sequences have caches of their own; pooled_batch.py has the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvkeep.engine.memory import MEMORY_FRACTION, MemoryCap, free_host_bytes, row_bytes
from kvkeep.engine.packed_forward import PackedForward
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import SamplingRows, TokenLogprobs
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.model.head_shards import agree_on_least
from kvkeep.storage.ragged import GROWTH
from kvkeep.storage.upload import Download, upload

Decoded = tuple[Request, int, TokenLogprobs | None]  # its next token, with logprobs if it wants them


@dataclass(frozen=True)
class InflightStep:
    """A decode step running on the device: its requests, and functions that wait for what it has sampled."""

    requests: dict[int, Request]  # by row
    tokens: Download
    logprobs: Callable[[], list[Any]]  # of `SamplingRows.logprobs`

    @classmethod
    def sample(
        cls,
        requests: Mapping[int, Request],
        rows: SamplingRows,
        logits: Tensor,
        positions: Tensor,
        likeliest: Tensor | None = None,
    ) -> InflightStep:
        """Sample the next token of every row. logits [rows, vocabulary], positions of these tokens [rows]

        likeliest: the likeliest tokens [rows], where they are known; those that are sampled take their place
        """
        allowed = {row: each.allowed() for row, each in requests.items() if each.how.constraint}
        if likeliest is None:
            tokens = rows.sample(logits, positions, allowed)
        else:
            tokens = likeliest
            if allowed or not rows.is_greedy(len(tokens)):
                tokens.copy_(rows.sample(logits, positions, allowed))
        logprobs = rows.logprobs(logits, tokens)
        return cls(dict(requests), Download(tokens), list if logprobs is None else Download(logprobs))

    @property
    def is_ready(self) -> bool:
        """Whether the tokens are on the host."""
        return self.tokens.is_ready

    def wait(self) -> list[Decoded]:
        tokens, wanted = self.tokens(), [row for row, each in self.requests.items() if each.how.logprobs is not None]
        found = dict(zip(sorted(wanted), self.logprobs(), strict=True))
        return [
            (request, tokens[row], TokenLogprobs.of(found[row], request.how.logprobs or 0) if row in found else None)
            for row, request in self.requests.items()
        ]


def sampling_rows(requests: list[Request], device: torch.device) -> SamplingRows:
    return SamplingRows.of([each.how for each in requests], device, [each.edit for each in requests])


class DecodeBatch:
    """Decodes each request through its own cache, as it would be alone, up to rounding."""

    def __init__(self, model: Any, max_rows: int, memory: MemoryCap | None = None) -> None:
        self.model, self.max_rows, self.memory = model, max_rows, memory
        self.by_row: dict[int, Request] = {}
        self.inflight: deque[InflightStep] = deque()

    @property
    def requests(self) -> list[Request]:
        """The requests that are admitted."""
        return list(self.by_row.values())

    @cached_property
    def _forward(self) -> PackedForward:
        return PackedForward(self.model)

    def has_room(self, request: Request, waiting: Iterable[Request]) -> bool:
        """Whether its prefilled sequence and answer fit beside the others; raises BadInput if they would not fit alone.

        waiting: those that will be admitted next
        """
        return len(self.by_row) < self.max_rows and self._has_memory(request, waiting)

    def _has_memory(self, request: Request, waiting: Iterable[Request]) -> bool:
        return self.memory is None or self._growth(request) <= self.memory.left

    def _growth(self, request: Request) -> int:
        """Bytes of its answer, and of a cache's room for more."""
        tokens = request.expected_tokens
        return row_bytes(self.model, request.how.max_new_tokens + tokens // GROWTH)

    def admit(self, request: Request) -> None:
        """Decode it from the next step on: its sequence is prefilled, its first token is sampled."""
        request.reserved = request.own_bytes + self._growth(request)
        self.by_row[self._free_row] = request

    @property
    def _free_row(self) -> int:
        return min(set(range(self.max_rows)) - set(self.by_row))

    def release(self, request: Request) -> None:
        """Take it out, done or not."""
        del self.by_row[self._row_of(request)]

    def _row_of(self, request: Request) -> int:
        return next(row for row, mine in self.by_row.items() if mine is request)

    def warmup(self, config: SequenceConfig, rows: int, progress: Callable[[str], None]) -> None:
        """Allocate and capture for so many rows."""

    def launch(self) -> None:
        """Decode one token for every request; on a GPU, do not wait for it."""
        requests = dict(enumerate(self.requests))
        chunks = [(each.sequence, torch.tensor(each.answer.ids[-1:])) for each in requests.values()]
        logits = torch.cat(self._forward(chunks))
        positions = upload([sequence.cache.seen for sequence, _ in chunks], logits.device)
        rows = sampling_rows(self.requests, logits.device)
        self.inflight.append(InflightStep.sample(requests, rows, logits, positions))

    @property
    def replays(self) -> bool:
        """Whether `launch` replays a captured graph: that can be done in the middle of another forward pass."""
        return False

    def collect(self) -> list[Decoded]:
        """The tokens of the last step; where steps are launched ahead, of the one before. Some requests may be done."""
        steps, self.inflight = self.inflight, deque()
        return [each for step in steps for each in step.wait()]

    def clear(self) -> None:
        """Drop all requests, whatever state a failed step has left."""
        self.by_row, self.inflight = {}, deque()


def fits_host(request: Request) -> bool:
    """Whether a retrieval method's tokens fit into host memory; where host_limit is set, that is the limit."""
    config = request.config
    unlimited = config.method.retrieval and config.cache_options.get("host_limit") is None
    free = free_host_bytes() if unlimited else None
    size = row_bytes(config.model, len(request.ids) + request.how.max_new_tokens)
    return bool(agree_on_least(config.model, free is None or size <= MEMORY_FRACTION * free))
