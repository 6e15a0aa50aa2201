"""Prefill: which prompts come next, how much of each, and one forward pass over all of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from kvkeep.cache.passes import PassEnd, ending
from kvkeep.engine.batch import DecodeBatch, fits_host
from kvkeep.engine.decoding import Decoding
from kvkeep.engine.exact import Exact
from kvkeep.engine.first_tokens import FirstTokens
from kvkeep.engine.held_memory import HeldMemory
from kvkeep.engine.held_requests import HeldRequests
from kvkeep.engine.pace import Pace
from kvkeep.engine.packed_forward import AfterLayer, PackedForward
from kvkeep.engine.request import Request, State
from kvkeep.model.hf_cache import attention_cost, execution_device

Chunk = tuple[Request, Tensor]  # a request, and those of its ids that are prefilled next
PACKED_TOKENS = {"cuda": 8192, "cpu": 1024}  # of several prompts in one forward pass; fewer, the more they attend to
HISTORY_COST = 0.05  # tokens that could be prefilled while one of a history is read from the host
EVICTION_TOKENS = 512  # that could be prefilled while a prompt is evicted from
MIN_CHUNK = 16  # tokens


class Abandoned(Exception):
    """All requests of a forward pass were cancelled while the model ran again over their prompts."""


@dataclass(eq=False)
class Prefilling:
    model: Any
    held: HeldRequests
    memory: HeldMemory
    decoding: Decoding
    first_tokens: FirstTokens
    exact: Exact
    pace: Pace

    def __post_init__(self) -> None:
        self.forward = PackedForward(self.model)
        self.attention_cost = attention_cost(self.model)
        self.device = execution_device(self.model).type

    def next_chunks(self) -> Iterator[Chunk]:
        """Give the next chunks of the prompts whose turn it is, as many as fit into one forward pass."""
        waiting = self.held.waiting
        others = len(waiting) > 1 and any(request.interactive for request in waiting)
        beside, first = self.held.is_read or others, True
        in_steps = beside and self.device != "cuda"  # where no decode steps pass between the layers
        limit = self.pace.tokens if in_steps else PACKED_TOKENS[self.device]
        for request in self._turns():
            if request.state is not State.VERIFYING and request.logits is not None and request.is_prefilled:
                with self.held.fails_alone(request):
                    self.first_tokens.begin(request, request.logits, at_once=True)
                continue
            cost = self._cost(request)
            is_split = len(request.sequence.token_ids) > request.num_cached
            is_submitted = request.interactive and not request.keeps_cache  # others may come meanwhile
            in_parts = beside or is_split or (is_submitted and self.device == "cpu")
            whole = request.next_chunk(None)
            ids = request.next_chunk(chunk_size(limit / cost)) if in_parts else whole
            if not first and not (request.packs and len(ids) == len(whole) and len(ids) * cost <= limit):
                return
            waiting.take_turn(request)
            yield request, ids
            limit, first = limit - len(ids) * cost, False
            if limit < 1 or not (request.packs and self.forward.shares_forward):
                return

    def _turns(self) -> Iterator[Request]:
        """Give the prompts that can be prefilled now. Behind one that does not fit, none begins."""
        held = self.held
        yield from held.verifying
        rows = 0 if held.prefilled else held.row_limit - held.num_rows
        waiting = list(held.waiting) if rows > 0 else []
        begun, fits = len(held.begun) if waiting else 0, True
        for request in waiting:
            if request.state is State.WAITING:
                fits = fits and begun < rows and self._start(request, alone=not (begun or held.num_rows))
                begun += fits
            if request.state is State.PREFILLING:
                yield request

    def _cost(self, request: Request) -> float:
        """The cost of its next token, where one that attends to nothing costs 1."""
        return 1 + self.attention_cost * request.sequence.cache.seen

    def _start(self, request: Request, alone: bool) -> bool:
        """Make its sequence. -> False: it failed, or has to wait until others are done"""
        try:
            if not (alone or fits_host(request)) or not self.memory.reserve(request, alone):
                return False
            request.start()
            if not self.memory.reserve(request, alone):  # more, where the host has no room for its history
                request.restart()
                return False
        except Exception as error:
            self.held.fail(request, error)
            return False
        return True

    def run(self, chunks: list[Chunk], active: list[DecodeBatch]) -> None:
        """Make one forward pass; between the layers of a long one, captured decode steps of the active batches pass."""
        if not chunks:
            self.pace.pause()
            return
        self.pace.begin_pass(self._pass_cost(chunks))
        self.pace.steps += bool(active)
        requests = [request for request, _ in chunks]
        meanwhile = partial(self._between_passes, requests, active)
        try:
            passing = self._between_layers(chunks, active)
            ends, verified = [], {each for each in requests if each.state is State.VERIFYING}
            for request, ids in chunks:  # what may wait after a prompt's last chunk is left to `FirstTokens`
                last = request.ends_with(ids)
                later = last and request.can_settle_later, last and request.can_draft_later
                how = request in verified, request.selects_again
                ends.append(PassEnd(*later, *how, meanwhile, self.memory.draft_room))
            with ending([request.sequence.cache for request in requests], ends):
                keep = [len(ids) if request in verified else 1 for request, ids in chunks]
                logits = self.forward([(request.sequence, ids) for request, ids in chunks], keep, passing)
        except Exception as error:
            self.held.check_alike(error)
            if len(chunks) == 1 and not isinstance(error, Abandoned):
                return self.held.fail(requests[0], error)
            for request in requests:  # alone, it will be seen whose error it is
                request.packs = False
            self.held.restart(requests)
        else:
            for request, after in zip(requests, logits, strict=True):
                with self.held.fails_alone(request):
                    if request in verified:
                        self.exact.end(request, after)
                    else:
                        self._advance(request, after[-1])

    def _between_passes(self, requests: list[Request], active: list[DecodeBatch]) -> None:
        """Let others decode. Raise `Abandoned` where nobody waits for any of the requests: the next step drops them."""
        self.decoding.replay_due(active)
        if all(request.cancelled for request in requests):
            raise Abandoned

    def _between_layers(self, chunks: list[Chunk], active: list[DecodeBatch]) -> AfterLayer | None:
        """What a pass calls after every layer: first tokens of the pass before are delivered, and others decode."""
        if not (self.first_tokens.are_awaited or any(batch.replays for batch in active)):
            return None
        layers = len(self.forward.compressed_layers)
        every = self.pace.layers_between(layers)

        def after(index: int) -> None:
            self.first_tokens.end_ready()
            if index % every == every - 1 and index < layers - 1:
                self.pace.steps += self.decoding.replay(self.decoding.in_use)

        return after

    def _pass_cost(self, chunks: list[Chunk]) -> float:
        """The cost of a pass, where a token that attends to nothing costs 1."""
        histories = [known for request, _ in chunks if (known := request.sequence.history)]
        prefilled = sum(len(ids) * self._cost(request) for request, ids in chunks)
        evicted = EVICTION_TOKENS * sum(request.ends_with(ids) for request, ids in chunks)
        return prefilled + evicted + HISTORY_COST * sum(known.tokens for known in histories)

    def _advance(self, request: Request, logits: Tensor) -> None:
        """After a chunk, report progress; after the last, begin the answer."""
        request.report_progress()
        if request.ends_part:
            request.sequence.cache.tracker.mark_prompt()
        if request.ends_part and not request.is_prefilled:
            self.memory.store_prefix(request)
            request.begin_part()
        if request.is_prefilled:
            self.memory.store_history(request)
            if not request.can_draft_later:
                request.reserved = 0
            if request.pin is not None:
                request.pinned = request.pin(request.sequence)
            if request.prefill_only:
                self.held.end(request)
            else:
                self.first_tokens.begin(request, logits)


def chunk_size(most: float) -> int:
    """Round down to a power of two, or one and a half: kernels plan for every new size."""
    power = 1 << int(max(MIN_CHUNK, most)).bit_length() - 1
    return power * 3 // 2 if most >= power * 3 / 2 else power
