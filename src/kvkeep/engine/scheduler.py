"""Continuous batching: each prompt is prefilled and compressed alone, then all decode together from a `RowPool`.

A finished sequence releases its row to the next waiting request. While a step runs on the device, the host detokenizes
the step before; so a finished sequence has run one step too many, whose token is ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.engine.cuda_graph import CudaGraphRunner
from kvkeep.engine.detokenizer import IncrementalDetokenizer
from kvkeep.engine.row_pool import RowPool
from kvkeep.engine.sampling import check_new_tokens, check_sampling, sample
from kvkeep.errors import BadInput
from kvkeep.model.hf_cache import execution_device


@dataclass
class Request:
    """One prompt, and its answer so far."""

    ids: Tensor  # [n]
    detokenizer: IncrementalDetokenizer
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    deltas: deque[str] = field(default_factory=deque)  # text to be streamed
    done: bool = False
    error: str = ""  # why there is no answer, or only part of one

    def __post_init__(self) -> None:
        check_new_tokens(self.max_new_tokens)
        check_sampling(self.temperature, self.top_p, self.top_k)

    @property
    def text(self) -> str:
        return self.detokenizer.text

    def fail(self, error: Exception) -> None:
        self.error, self.done = str(error).splitlines()[0], True

    def restart(self) -> None:
        """Drop the answer so far."""
        self.detokenizer, self.deltas = IncrementalDetokenizer(self.detokenizer.tokenizer), deque()

    def add(self, token: int, eos_token_ids: set[int]) -> None:
        if token not in eos_token_ids:
            self.deltas.append(self.detokenizer.add(token))
        self.done = token in eos_token_ids or len(self.detokenizer.ids) >= self.max_new_tokens
        if self.done:
            self.deltas.append(self.detokenizer.finish())


@dataclass(frozen=True)
class InflightStep:
    """A decode step running on the device: its requests, and the tokens it will have sampled."""

    requests: dict[int, Request]  # by row
    tokens: Tensor  # [rows] on the host
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, requests: dict[int, Request], tokens: Tensor) -> InflightStep:
        if tokens.device.type != "cuda":
            return cls(dict(requests), tokens.clone(), None)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tokens.device))
        return cls(dict(requests), host, event)

    def wait(self) -> list[int]:
        """-> the token of every row"""
        if self.event:
            self.event.synchronize()
        return self.tokens.tolist()


class Scheduler:
    """Requests over the rows of a pool."""

    def __init__(
        self,
        model: Any,
        prefill: Callable[[Tensor], tuple[Cache, Tensor]],
        eos_token_ids: set[int],
        pool: RowPool,
        seed: int = 0,
    ):
        """prefill: ids -> a cache of them, and the logits after the last"""
        self.model, self.prefill, self.eos_token_ids, self.pool = model, prefill, eos_token_ids, pool
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by row
        self.prefilled: tuple[Cache, Tensor] | None = None  # of the first waiting request, if it has no room yet
        device = execution_device(model)
        self.tokens = torch.zeros(pool.rows, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(pool.rows, 1, dtype=torch.int64, device=device)
        self.temperature, self.top_p = torch.zeros(pool.rows, device=device), torch.ones(pool.rows, device=device)
        self.top_k = torch.zeros(pool.rows, dtype=torch.int64, device=device)
        self.runners: dict[int, CudaGraphRunner] = {}  # by number of rows
        self.inflight: InflightStep | None = None
        self.generator = torch.Generator(device).manual_seed(seed)

    def submit(self, request: Request) -> Request:
        self.waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def run(self) -> Iterator[Request]:
        """Requests in the order they finish."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Request]:
        """Admit waiting requests, launch the next decode step, process the tokens of the last. -> finished requests"""
        done = self._admit_waiting()
        last, self.inflight = self.inflight, self._decode() if self.running else None
        for row, token in enumerate(last.wait()) if last else ():
            request = self.running.get(row)
            if request is not None and request is last.requests.get(row):
                request.add(token, self.eos_token_ids)
        for row in [row for row, request in self.running.items() if request.done]:
            done.append(self.running.pop(row))
            self.pool.release(row)
        return done

    def _admit_waiting(self) -> list[Request]:
        """Prefill the requests there is room for. -> those that failed, or finished with the first token"""
        finished: list[Request] = []
        free = [row for row in range(self.pool.rows) if row not in self.running]
        while self.waiting and free:
            request = self.waiting[0]
            try:
                cache, logits = self.prefilled or self.prefill(request.ids)
            except (BadInput, torch.OutOfMemoryError) as error:
                request.fail(error)
            else:
                room = request.max_new_tokens
                if self.pool.could_fit(cache, room) and not self.pool.fits(cache, room):
                    self.prefilled = cache, logits  # until a row is released
                    return finished
                self._admit(free, request, cache, logits)
            self.prefilled = None
            self.waiting.popleft()
            finished += [request] if request.done else []
        return finished

    def _admit(self, free: list[int], request: Request, cache: Cache, logits: Tensor) -> None:
        if not self.pool.fits(cache, request.max_new_tokens):
            request.error, request.done = self._too_large(cache, request), True
            return
        first = self._sample_first(request, logits) if request.temperature else logits.argmax()
        request.add(int(first), self.eos_token_ids)
        if request.done:
            return
        row = free.pop(0)
        self.pool.admit(row, cache, request.max_new_tokens)
        self.running[row] = request
        self.tokens[row], self.positions[row] = first, len(request.ids)
        self.temperature[row], self.top_p[row], self.top_k[row] = request.temperature, request.top_p, request.top_k

    def _sample_first(self, request: Request, logits: Tensor) -> Tensor:
        temperature, top_p = logits.new_tensor([request.temperature]), logits.new_tensor([request.top_p])
        top_k = torch.tensor([request.top_k], device=logits.device)
        return sample(logits[None], temperature, top_p, self.generator, top_k)

    def _too_large(self, cache: Cache, request: Request) -> str:
        layers, room = self.pool.compressed_layers, request.max_new_tokens
        slots = max(sum(self.pool.sizes(cache, i, room)) for i in layers)
        most = max(max(cache.backend.store[i].row_lengths(0)) for i in layers) + room
        return (
            f"prompt and answer need {slots} slots of a layer and up to {most} of a "
            f"key head; the pool has {self.pool.tokens} and {self.pool.longest}."
        )

    def _decode(self) -> InflightStep:
        """Decode one token for every running row, and for free rows between them."""
        rows = 1 << max(self.running).bit_length()  # rows are allocated from the first, so few are free
        rows = min(rows, self.pool.rows)
        with torch.inference_mode():
            if rows not in self.runners:
                self.runners[rows] = self._runner(rows)
            self.pool.set_active_rows(rows)
            logits = self.runners[rows]()
            if any(request.temperature for request in self.running.values()):
                how = self.temperature[:rows], self.top_p[:rows], self.generator, self.top_k[:rows]
                self.tokens[:rows, 0] = sample(logits, *how)
            return InflightStep.of(self.running, self.tokens[:rows, 0])

    def _runner(self, rows: int) -> CudaGraphRunner:
        """A decode step that replaces every row's token by the likeliest next one."""
        tokens, positions, model, pool = self.tokens[:rows], self.positions[:rows], self.model, self.pool

        def run() -> Tensor:  # without self, which holds it: the pool is freed with the scheduler
            logits = model(tokens, position_ids=positions, past_key_values=pool).logits[:, -1]
            torch.argmax(logits, -1, keepdim=True, out=tokens)
            positions.add_(1)
            return logits

        before = tokens.clone(), positions.clone()
        with pool.graph_capture_scratch(rows):
            runner = CudaGraphRunner(run, model)
        tokens.copy_(before[0])
        positions.copy_(before[1])
        return runner
