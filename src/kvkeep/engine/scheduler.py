"""Many prompts at once: each is read and compressed by itself, then all are written together, a token each at a time.

A sequence that is done leaves, and the next that waits takes its place. While a pass runs on the device, the host turns
the tokens of the one before into words; so a sequence that ends has had one pass too many, which nobody looks at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.engine.cuda_graph import Replay
from kvkeep.engine.detokenizer import Unfolding
from kvkeep.engine.draw import draw
from kvkeep.engine.row_pool import Pool
from kvkeep.engine.sampling import check_new_tokens, check_sampling
from kvkeep.errors import BadInput
from kvkeep.model.hf_cache import runs_on


@dataclass
class Request:
    """One prompt, and what was written for it so far."""

    ids: Tensor  # [n]
    words: Unfolding
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    pieces: deque[str] = field(default_factory=deque)  # not read yet
    done: bool = False
    refused: str = ""  # why there is no answer, or only part of one

    def __post_init__(self) -> None:
        check_new_tokens(self.max_new_tokens)
        check_sampling(self.temperature, self.top_p, self.top_k)

    @property
    def text(self) -> str:
        return self.words.text

    def refuse(self, why: Exception) -> None:
        self.refused, self.done = str(why).splitlines()[0], True

    def begin_again(self) -> None:
        """As if nothing had been written."""
        self.words, self.pieces = Unfolding(self.words.tokenizer), deque()

    def add(self, token: int, ends: set[int]) -> None:
        if token not in ends:
            self.pieces.append(self.words.add(token))
        self.done = token in ends or len(self.words.ids) >= self.max_new_tokens
        if self.done:
            self.pieces.append(self.words.end())


@dataclass(frozen=True)
class Flight:
    """A pass under way: whom it is for, and the tokens it will have found."""

    requests: dict[int, Request]  # by row
    tokens: Tensor  # [rows] on the host
    landed: torch.cuda.Event | None

    @classmethod
    def of(cls, requests: dict[int, Request], tokens: Tensor) -> Flight:
        if tokens.device.type != "cuda":
            return cls(dict(requests), tokens.clone(), None)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record(torch.cuda.current_stream(tokens.device))
        return cls(dict(requests), host, landed)

    def land(self) -> list[int]:
        if self.landed:
            self.landed.synchronize()
        return self.tokens.tolist()


class Batch:
    """Rows of a pool, and who has them."""

    def __init__(
        self, model: Any, read: Callable[[Tensor], tuple[Cache, Tensor]], ends: set[int], pool: Pool, seed: int = 0
    ):
        """read: ids -> a cache that has read them, and the logits after the last"""
        self.model, self.read, self.ends, self.pool = model, read, ends, pool
        self.waiting: deque[Request] = deque()
        self.at_work: dict[int, Request] = {}
        self.ahead: tuple[Cache, Tensor] | None = None  # of the first that waits, read but not let in
        place = {"device": runs_on(model)}
        self.tokens = torch.zeros(pool.rows, 1, dtype=torch.int64, **place)
        self.positions = torch.zeros(pool.rows, 1, dtype=torch.int64, **place)
        self.heat, self.share = torch.zeros(pool.rows, **place), torch.ones(pool.rows, **place)
        self.most = torch.zeros(pool.rows, dtype=torch.int64, **place)  # top_k
        self.passes: dict[int, Replay] = {}  # by how many rows
        self.flight: Flight | None = None
        self.source = torch.Generator(runs_on(model)).manual_seed(seed)

    def submit(self, request: Request) -> Request:
        self.waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.at_work)

    def run(self) -> Iterator[Request]:
        """Requests in the order they are done."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Request]:
        """Let in who can come in, send off everybody's next pass, hand out the tokens of the last. -> who is done"""
        done = self._let_in()
        last, self.flight = self.flight, self._decode() if self.at_work else None
        for row, token in enumerate(last.land()) if last else ():
            request = self.at_work.get(row)
            if request is not None and request is last.requests.get(row):
                request.add(token, self.ends)
        for row in [row for row, request in self.at_work.items() if request.done]:
            done.append(self.at_work.pop(row))
            self.pool.release(row)
        return done

    def _let_in(self) -> list[Request]:
        """Read the prompts of those there is room for. -> who was refused, or done with the first token"""
        over: list[Request] = []
        free = [row for row in range(self.pool.rows) if row not in self.at_work]
        while self.waiting and free:
            request = self.waiting[0]
            try:
                cache, logits = self.ahead or self.read(request.ids)
            except (BadInput, torch.OutOfMemoryError) as error:
                request.refuse(error)
            else:
                room = request.max_new_tokens
                if self.pool.holds(cache, room) and not self.pool.fits(cache, room):
                    self.ahead = cache, logits  # somebody will leave
                    return over
                self._admit(free, request, cache, logits)
            self.ahead = None
            self.waiting.popleft()
            over += [request] if request.done else []
        return over

    def _admit(self, free: list[int], request: Request, cache: Cache, logits: Tensor) -> None:
        if not self.pool.fits(cache, request.max_new_tokens):
            request.refused, request.done = self._too_large(cache, request), True
            return
        first = self._first(request, logits) if request.temperature else logits.argmax()
        request.add(int(first), self.ends)
        if request.done:
            return
        row = free.pop(0)
        self.pool.admit(row, cache, request.max_new_tokens)
        self.at_work[row] = request
        self.tokens[row], self.positions[row] = first, len(request.ids)
        self.heat[row], self.share[row], self.most[row] = request.temperature, request.top_p, request.top_k

    def _first(self, request: Request, logits: Tensor) -> Tensor:
        heat, share = logits.new_tensor([request.temperature]), logits.new_tensor([request.top_p])
        most = torch.tensor([request.top_k], device=logits.device)
        return draw(logits[None], heat, share, self.source, most)

    def _too_large(self, cache: Cache, request: Request) -> str:
        layers, room = self.pool.owned, request.max_new_tokens
        slots = max(sum(self.pool.sizes(cache, i, room)) for i in layers)
        most = max(max(cache.store[i].row_lengths(0)) for i in layers) + room
        return (
            f"prompt and answer need {slots} slots of a layer and up to {most} of a "
            f"key head; the pool has {self.pool.tokens} and {self.pool.longest}."
        )

    def _decode(self) -> Flight:
        """One forward pass of every row in use, and of free ones between them."""
        rows = 1 << max(self.at_work).bit_length()  # rows are given out from the first, so few are free
        rows = min(rows, self.pool.rows)
        with torch.inference_mode():
            if rows not in self.passes:
                self.passes[rows] = self._pass(rows)
            self.pool.open(rows)
            logits = self.passes[rows]()
            if any(request.temperature for request in self.at_work.values()):
                how = self.heat[:rows], self.share[:rows], self.source, self.most[:rows]
                self.tokens[:rows, 0] = draw(logits, *how)
            return Flight.of(self.at_work, self.tokens[:rows, 0])

    def _pass(self, rows: int) -> Replay:
        """Reads every row's token and leaves the likeliest next in its place."""
        tokens, positions, model, pool = self.tokens[:rows], self.positions[:rows], self.model, self.pool

        def run() -> Tensor:  # without self, which holds it: the pool is freed as soon as nobody has the batch
            logits = model(tokens, position_ids=positions, past_key_values=pool).logits[:, -1]
            torch.argmax(logits, -1, keepdim=True, out=tokens)
            positions.add_(1)
            return logits

        before = tokens.clone(), positions.clone()
        with pool.rehearsal(rows):
            replay = Replay(run, model)
        tokens.copy_(before[0])
        positions.copy_(before[1])
        return replay
