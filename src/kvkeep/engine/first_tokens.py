"""From a prompt's last chunk to a row: its first token is sampled, its draft decoded, its cache settled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.decode.draft_pool import MOST_ROWS, most_held
from kvkeep.cache.passes import PassEnd, ending, run_passes
from kvkeep.engine.batch import DecodeBatch, InflightStep, sampling_rows
from kvkeep.engine.decoding import Decoding
from kvkeep.engine.exact import Exact
from kvkeep.engine.held_memory import HeldMemory
from kvkeep.engine.held_requests import HeldRequests
from kvkeep.engine.request import Request, State
from kvkeep.storage.upload import upload

MOST_PASSES = 4  # that a draft waits for others while somebody reads its answer


@dataclass(eq=False)
class FirstTokens:
    """The end of a prefill may wait for the next pass: the device has that to do meanwhile."""

    model: Any
    eos_token_ids: set[int]
    held: HeldRequests
    memory: HeldMemory
    decoding: Decoding
    exact: Exact
    looks_between_layers: bool  # whether first tokens are looked for in the middle of the next pass
    passes_waited: int = 0  # of the prompts whose drafts are due

    def begin(self, request: Request, logits: Tensor, at_once: bool = False) -> None:
        """Sample the first token of a prompt that is prefilled. logits [vocabulary]

        at_once: nothing of its prefill was left for later
        """
        request.eos_token_ids = self.eos_token_ids
        rows, position = sampling_rows([request], logits.device), upload([len(request.ids)], logits.device)
        if request.banned_first:
            logits = logits.index_fill(-1, upload(list(request.banned_first), logits.device), float("-inf"))
        first = InflightStep.sample({0: request}, rows, logits[None], position)
        self.held.waiting.remove(request)
        self.held.first_tokens[request] = first
        drafts = request.can_draft_later and not at_once
        request.move(State.DRAFTING if drafts else State.SAMPLED)
        if at_once or not (drafts or self._may_wait_for_others(request)):
            self._end(request)

    def _may_wait_for_others(self, request: Request) -> bool:
        """Whether the next prompts' pass is launched before this prefill ends, so that the device has work."""
        if not request.can_settle_later or request.how.exact:
            return False
        return not request.interactive or (self.looks_between_layers and len(self.held.waiting) > 0)

    @property
    def are_awaited(self) -> bool:
        """Whether somebody waits for a first token that is looked for between layers."""
        return self.looks_between_layers and any(request.interactive for request in self.held.first_tokens)

    def end_ready(self) -> None:
        """In the middle of the next pass, deliver first tokens that have come; without a draft, end prefills."""
        if not self.looks_between_layers:
            return
        for request in [each for each, first in self.held.first_tokens.items() if first.is_ready]:
            with torch.inference_mode(False), self.held.fails_alone(request):
                if request.state is State.SAMPLED:
                    self._end(request)
                else:
                    self._deliver(request)

    def end(self, sampled: list[Request], prefilled: list[Request], active: list[DecodeBatch]) -> None:
        """End the prefills of these that have a sampled token, from before the pass that `prefilled` were in."""
        due = [each for each in self.held.first_tokens if each.state is State.DRAFTING]
        begins = bool(due) and not self._may_wait(due, prefilled)
        self.passes_waited = 0 if begins else self.passes_waited + bool(due)
        for request in list(self.held.first_tokens) if begins else sampled:
            if request.state is State.DRAFTING:
                with self.held.fails_alone(request):
                    self._deliver(request)
        if begins:
            self._run_passes(due, active)
        for request in sampled:
            if request.state is State.SAMPLED:
                self._end(request)

    def _deliver(self, request: Request) -> None:
        """Deliver a token before what is kept is stored or selected: it does not depend on that. An end has to wait."""
        if request.answer.ids:
            return
        for _, token, logprobs in self.held.first_tokens[request].wait():
            request.sequence.cache.check()
            if request.goes_on_after(token):
                request.add(token, logprobs)

    def _may_wait(self, due: list[Request], prefilled: list[Request]) -> bool:
        """Whether drafts wait for those of the prompts prefilled just now; where somebody reads, for a few passes."""
        if not any(request.can_draft_later for request in prefilled):
            return False
        if self.passes_waited >= MOST_PASSES and any(request.interactive for request in due):
            return False
        held = sum(request.sequence.cache.nbytes for request in due)
        return len(due) < MOST_ROWS and held < most_held(self.model)

    def _run_passes(self, requests: list[Request], active: list[DecodeBatch]) -> None:
        """Decode drafts that have waited: together or, where that fails, one by one."""
        caches = [request.sequence.cache for request in requests]
        end = PassEnd(between_passes=partial(self.decoding.replay_due, active), draft_room=self.memory.draft_room)
        with ending(caches, [end] * len(caches)):
            try:
                run_passes(caches)
            except Exception as error:
                self.held.check_alike(error)
            for request, cache in zip(requests, caches, strict=True):
                try:
                    run_passes([cache])  # nothing, if it was one of those that did not fail
                    request.reserved = 0
                    request.move(State.SAMPLED)
                except Exception as error:
                    self.held.fail(request, error)

    def _end(self, request: Request) -> None:
        """Deliver a first token, and find a row for the request."""
        for _, token, logprobs in self.held.first_tokens[request].wait():
            with self.held.fails_alone(request):
                self._deliver(request)
                request.sequence.cache.settle()
                request.count_kept()
                if not request.how.exact:
                    request.sequence.drop_history()
                if not request.answer.ids:
                    request.add(token, logprobs)
                if request.done:
                    self.held.remove(request)
                elif not self.exact.begin(request):
                    self.decoding.place(request)
        self.decoding.admit()
