"""Answers that are exact: their tokens are guessed over what a method kept, and verified against the whole history.

    GUESSING    a request of its own decodes the next tokens in a row like any other
    VERIFYING   one forward pass attends from all of them to the whole history, beside the chunks of prompts

After each token of that pass the next one is sampled as the whole model would sample it. Sampling depends on logits,
seed and position alone, so the answer is that of `full`, token for token, up to rounding: guesses are right until the
first that is another token. The right ones are kept with the keys and values of that pass; the others are taken back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.engine.batch import Decoded, InflightStep, sampling_rows
from kvkeep.engine.decoding import Decoding
from kvkeep.engine.held_requests import HeldRequests
from kvkeep.engine.request import Request, State
from kvkeep.engine.sampling import TokenLogprobs
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.errors import BadParameter, SlowAnswerWarning
from kvkeep.storage.history import HostPool
from kvkeep.storage.upload import upload

MANY_PASSES, PAYING = 8, 2  # after so many passes over a history, each should bring so many tokens


def exact_config(config: SequenceConfig, pool: HostPool | None) -> SequenceConfig:
    """A config for exact answers: nothing is evicted while guesses are decoded. Raise why there can be none."""
    method = config.method
    if config.is_exact:
        return config
    if pool is None:
        raise BadParameter("exact=True verifies answers against a history; make the engine with history='host'.")
    if pool.bits:
        raise BadParameter("exact=True needs a history in the model's dtype; leave history_storage= out.")
    reasons = {
        "it attends to no token farther than the context length": method.placement is not None,
        "it scores a token only once, and keeps no history": method.scores_own_tokens,
        "it evicts nothing, and retrieves at every step": method.retrieval is not None,
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        raise BadParameter(f"exact=True cannot work with '{method.name}': {why[0]}. Use another method.")
    return config.appending


@dataclass(eq=False)
class Guesses(Request):
    """Some tokens after an answer so far. They are no text, and end nothing but themselves."""

    def add(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        if not self.is_end(token):
            self.answer.ids.append(token)
        if self.is_end(token) or len(self.answer.ids) >= self.how.max_new_tokens:
            self.finish()


@dataclass(eq=False)
class Exact:
    """Guesses and verifies, in turns."""

    held: HeldRequests
    decoding: Decoding

    def begin(self, request: Request) -> bool:
        """After the first token. -> False: what is kept of its prompt is all of it, so any answer is exact"""
        if not request.how.exact:
            return False
        if request.is_whole:
            request.sequence.drop_history()
            return False
        del self.held.first_tokens[request]
        self._guess(request)
        return True

    def _guess(self, request: Request) -> None:
        answer, how = request.answer.ids, request.how
        count = min(request.agreement.next_guesses, how.max_new_tokens - len(answer) - 1)  # one more comes with them
        if count == 0:
            return self._verify(request, [])
        fewest, most = min(how.min_tokens, len(answer) + count), len(answer) + count
        how = replace(how, max_new_tokens=most, min_tokens=fewest, stop=(), logprobs=None)
        guesses = Guesses(request.config, request.ids, how, request.sequence.fork(), interactive=request.interactive)
        guesses.eos_token_ids, guesses.answer.ids = request.eos_token_ids, list(answer)
        request.move(State.GUESSING)
        self.held.guesses[request] = guesses
        self.decoding.place(guesses)

    def end_guesses(self) -> None:
        """Have guesses that are complete verified."""
        for request, guesses in list(self.held.guesses.items()):
            if isinstance(guesses.error, Exception):
                self.held.fail(request, guesses.error)
            elif guesses.done:
                del self.held.guesses[request]
                self._verify(request, guesses.answer.ids[len(request.answer.ids) :])

    def _verify(self, request: Request, guessed: list[int]) -> None:
        request.move(State.VERIFYING)
        request.guessed = guessed
        self.held.waiting.put_back([request])

    def end(self, request: Request, logits: Tensor) -> None:
        """After the pass that verified its guesses. logits [1 + guesses, vocabulary]"""
        sequence, found, guessed, right = request.sequence, request.agreement, request.guessed, 0
        found.passes, found.guessed = found.passes + 1, found.guessed + len(guessed)
        for right, (_, token, logprobs) in enumerate(self._sampled(request, logits)):  # noqa: B007
            found.right += right > 0  # before the token, which may end the answer: whoever reads it reads this, too
            request.add(token, logprobs)
            if request.done or right == len(guessed) or guessed[right] != token:
                break
        with torch.inference_mode():
            sequence.accept(1 + right)
        found.adapt(len(guessed), right)
        self.held.waiting.remove(request)
        if request.done:
            sequence.drop_history()
            warn_if_slow(request)
        else:
            self._guess(request)

    def _sampled(self, request: Request, logits: Tensor) -> Iterator[Decoded]:
        """The token after each; one after the other, where a token depends on what the answer says before it."""
        ends = len(request.sequence.token_ids) + 1
        positions = upload(list(range(ends - len(logits), ends)), logits.device)
        size = 1 if request.how.constraint or request.edit else len(logits)
        for part, where in zip(logits.split(size), positions.split(size), strict=True):
            rows = sampling_rows([request] * len(part), logits.device)
            yield from InflightStep.sample(dict.fromkeys(range(len(part)), request), rows, part, where).wait()


def warn_if_slow(request: Request) -> None:
    """Say where guessing did not pay."""
    found, tokens = request.agreement, len(request.answer.ids)
    if found.passes >= MANY_PASSES and tokens < PAYING * found.passes:
        method, budget = request.config.method.name, request.config.budget
        warnings.warn(
            f"exact=True read the whole history {found.passes} times for {tokens} tokens: '{method}' with a budget of "
            f"{budget} guessed {found.right} of {found.guessed} right. A larger budget guesses better; 'full' may be "
            "faster.",
            SlowAnswerWarning, stacklevel=2,
        )  # fmt: skip
