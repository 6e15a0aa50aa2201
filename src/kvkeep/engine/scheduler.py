"""Continuous batching: each step decodes one token for every running request, beside a chunk of the waiting prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvkeep.engine.decoding import Decoding
from kvkeep.engine.exact import Exact
from kvkeep.engine.first_tokens import FirstTokens
from kvkeep.engine.held_memory import HeldMemory
from kvkeep.engine.held_requests import HeldRequests
from kvkeep.engine.pace import Pace
from kvkeep.engine.prefilling import Prefilling
from kvkeep.engine.request import Request
from kvkeep.engine.store import Store
from kvkeep.model.head_shards import head_shards
from kvkeep.model.hf_cache import execution_device, uncompiled

News = tuple[list[Request], list[Request]]  # requests submitted since the last step; those that are cancelled


class Scheduler:
    """Its parts share the requests they hold: prefilling ends in first tokens, these in decoding."""

    def __init__(
        self,
        model: Any,
        eos_token_ids: set[int],
        max_rows: int = 64,
        max_tokens: int | None = None,
        memory: int | None = None,
        store: Store | None = None,
        target_itl: float | None = None,
    ) -> None:
        """max_tokens: as in `PooledBatch`; memory: bytes of keys and values of all requests, None: what is free

        target_itl: seconds between two tokens of an answer while prompts are prefilled
        """
        self.model, self.device = model, execution_device(model).type
        self.held = HeldRequests(max_rows)
        self.memory = HeldMemory(model, self.held, memory, store or Store())
        is_split = head_shards(uncompiled(model)) is not None
        self.pace = Pace.of(self.device, target_itl, learns=not is_split)  # several processes would learn other things
        self.decoding = Decoding(model, self.held, self.memory, max_tokens, self.pace)
        self.exact = Exact(self.held, self.decoding)
        looks = self.device == "cuda" and not is_split  # several processes would look at different times
        self.first_tokens = FirstTokens(model, eos_token_ids, self.held, self.memory, self.decoding, self.exact, looks)
        self.prefilling = Prefilling(
            model, self.held, self.memory, self.decoding, self.first_tokens, self.exact, self.pace
        )
        self.agree: Callable[[News], News] = lambda news: news  # what all processes that share the model know

    def submit(self, request: Request) -> Request:
        """Take a request, from any thread."""
        self.held.submitted.append(request)
        return request

    def run(self, requests: Iterable[Request]) -> None:
        """Step until all of these are done."""
        submitted = [self.submit(request) for request in requests]
        while not all(request.done for request in submitted):
            self.step()
        self.decoding.release_finished()

    def step(self) -> None:
        """Launch a decode step of all running requests, prefill a chunk beside it, deliver the decoded tokens."""
        held, decoding = self.held, self.decoding
        decoding.release_finished()
        self.drop_cancelled()
        self.exact.end_guesses()
        decoding.admit(between_steps=True)
        chunks, sampled = list(self.prefilling.next_chunks()), list(held.first_tokens)
        # while nobody reads the answers, all prompts are prefilled first: a step of many rows takes little longer
        active = decoding.in_use if held.is_read or not chunks else []
        for batch in active:
            decoding.launch(batch)
            decoding.collect(batch)  # on a GPU the tokens of the step before: it has this one to do, and a pass
        self.prefilling.run(chunks, active)
        self.first_tokens.end(sampled, [request for request, _ in chunks], active)

    def drop_cancelled(self) -> None:
        """Between two steps, end cancelled requests, and have those that were submitted join the others."""
        held = self.held
        new = [held.submitted[number] for number in range(len(held.submitted))]
        gone = [each for each in (*new, *held.taken) if each.cancelled]
        submitted, gone = self.agree((new, gone))
        for request in submitted:
            held.waiting.append(request)
        for _ in new:  # last: `abort` finds them, whatever is raised before
            held.submitted.popleft()
        for request in gone:
            if not request.done:  # else its row is released as that of any other
                held.end(request)
