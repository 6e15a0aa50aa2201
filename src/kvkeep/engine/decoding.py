"""The decode steps of a scheduler: rows for prefilled requests, one token for each of them, and its delivery."""

from __future__ import annotations

import torch

from kvkeep.engine.batches import Batches
from kvkeep.engine.decode_batch import DecodeBatch
from kvkeep.engine.held_memory import HeldMemory
from kvkeep.engine.held_requests import OUT_OF_MEMORY, HeldRequests, own_error
from kvkeep.engine.request import Request, State


class Decoding:
    def __init__(self, held: HeldRequests, memory: HeldMemory, batches: Batches) -> None:
        self.held, self.memory, self.batches = held, memory, batches

    @property
    def in_use(self) -> list[DecodeBatch]:
        """The batches that have requests."""
        return [batch for batch in self.held.batches.values() if batch.requests]

    def place(self, request: Request) -> None:
        """Choose the batch of a request whose first token is delivered: it waits for a row from now on."""
        batch = self.batches.batch_for(request)
        del self.held.first_tokens[request]
        self.held.batch_of[request] = batch
        request.move(State.PREFILLED)

    def admit(self, between_steps: bool = False) -> None:
        """Give rows to prefilled requests in their order, until one does not fit."""
        while prefilled := self.held.prefilled:
            request = prefilled[0]
            batch = self.held.batch_of[request]
            try:
                if not self.memory.has_room(request, batch, between_steps):
                    return
                batch.admit(request)
                request.move(State.DECODING)
            except OUT_OF_MEMORY as error:
                self.held.check_alike(error)
                self._restart(batch, [*batch.requests, request], error)
            except Exception as error:
                self.held.check_alike(error)
                self.held.end(request, error)

    def launch(self, batch: DecodeBatch) -> None:
        try:
            batch.launch()
        except OUT_OF_MEMORY as error:
            self.held.check_alike(error)
            self._restart(batch, list(batch.requests), error)

    def _restart(self, batch: DecodeBatch, requests: list[Request], error: BaseException) -> None:
        """Restart these, fewer at a time, in another pool: this one may have grown in some layers alone."""
        held = self.held
        self.release_finished()
        requests = [each for each in requests if not each.done]
        batch.clear()
        held.batches = {kind: each for kind, each in held.batches.items() if each is not batch}
        held.row_limit = max(1, len(requests) // 2)
        lost = [each for each in requests if len(requests) == 1 or each.continues]
        for request in lost:
            del held.batch_of[request]
            request.finish(own_error(error))
        held.restart([each for each in requests if each not in lost])
        for request in [each for each in held.prefilled if held.batch_of[each] is batch]:
            held.batch_of[request] = self.batches.batch_for(request)

    def replay(self, batches: list[DecodeBatch]) -> None:
        """Make a decode step in the middle of a prefill pass."""
        with torch.inference_mode(False):
            self.release_finished()
            for batch in batches:
                if batch.replays:
                    self.launch(batch)
                    self.collect(batch)

    def collect(self, batch: DecodeBatch) -> None:
        """Deliver the tokens of a step."""
        for request, token, logprobs in batch.collect():
            if request.done:  # one step too many
                continue
            request.steps += 1
            request.add(token, logprobs)
            if request.done and not request.keeps_cache:
                self.release_finished()

    def release_finished(self) -> None:
        """Release the rows of requests that are done. A cache that is kept is completed here, between two steps."""
        for request in [each for each in self.held.batch_of if each.done]:
            self.held.remove(request)
            if not self.held.num_rows:  # whoever ran out of memory has been answered with fewer rows
                self.held.row_limit = self.held.max_rows
