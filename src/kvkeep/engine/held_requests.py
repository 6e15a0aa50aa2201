"""All requests of a scheduler, and the batches that decode them: what its parts share."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest

import torch

from kvkeep.engine.batch import DecodeBatch, InflightStep
from kvkeep.engine.request import IN_QUEUE, Request, State
from kvkeep.errors import StoreFull

OUT_OF_MEMORY = torch.OutOfMemoryError, StoreFull


class FairQueue:
    """Takes one request of every client, then the next of every client.

    A turn is a chunk: the client that had none for longest comes first. Within a client, those whose prefill has begun
    come first, then first come, first served.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []  # in the order in which they came
        self.turns: dict[str, int] = {}  # the number of the last turn of a client

    def __len__(self) -> int:
        """The number of requests, from any thread."""
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        queues: dict[str, list[Request]] = {}
        for request in self.requests:
            queues.setdefault(request.client, []).append(request)
        clients = sorted(queues, key=lambda client: self.turns.get(client, 0))
        turns = zip_longest(*(sorted(queues[each], key=lambda request: not request.started) for each in clients))
        return (each for turn in turns for each in turn if each is not None)

    def append(self, request: Request) -> None:
        self.requests.append(request)

    def put_back(self, requests: list[Request]) -> None:
        """Put requests before the others of their clients."""
        self.requests[:0] = requests

    def take_turn(self, request: Request) -> None:
        """Make its client the last one: a chunk of it is prefilled. This holds also if it was the only request."""
        self.turns[request.client] = 1 + max(self.turns.values(), default=0)

    def remove(self, request: Request) -> None:
        """Take it out, and forget the turns of clients that have no request and would be the first, as new ones are."""
        self.requests.remove(request)
        oldest = min((self.turns.get(each.client, 0) for each in self.requests), default=sys.maxsize)
        self.turns = {client: turn for client, turn in self.turns.items() if turn >= oldest}

    def clear(self) -> None:
        self.requests, self.turns = [], {}


class HeldRequests:
    """A request's state says how far it is; what is held here is its order among others, and its row."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.row_limit = max_rows  # lower while memory is short
        self.submitted: deque[Request] = deque()  # by any thread, since the last step
        self.waiting = FairQueue()
        self.first_tokens: dict[Request, InflightStep] = {}  # of those DRAFTING or SAMPLED
        self.batch_of: dict[Request, DecodeBatch] = {}  # of those PREFILLED or DECODING, or DONE and not released
        self.guesses: dict[Request, Request] = {}  # of those GUESSING: who decodes their next tokens
        self.batches: dict[str, DecodeBatch] = {}  # by kind
        self.check_alike: Callable[[Exception], None] = lambda error: None  # raises what one process alone must not do

    @property
    def num_rows(self) -> int:
        """The number of requests that are prefilled."""
        guessed = sum(guesses not in self.batch_of for guesses in list(self.guesses.values()))
        return len(self.first_tokens) + len(self.batch_of) + guessed + len(self.verifying)

    @property
    def num_waiting(self) -> int:
        """The number of requests whose prompts are not prefilled to the end. From any thread."""
        return len(self.submitted) + len(self.waiting) - len(self.verifying)

    @property
    def verifying(self) -> list[Request]:
        """The requests whose guesses wait for a pass over the history."""
        return [request for request in self.waiting if request.state is State.VERIFYING]

    @property
    def num_requests(self) -> int:
        """The number of all requests, of which some may be done. From any thread."""
        return self.num_waiting + self.num_rows

    @property
    def taken(self) -> list[Request]:
        """All requests but those submitted since the last step."""
        return [*self.waiting, *self.first_tokens, *self.guesses, *self.batch_of]

    @property
    def requests(self) -> list[Request]:
        return [*self.submitted, *self.taken]

    @property
    def begun(self) -> list[Request]:
        """The requests whose prompts are prefilled in part."""
        return [request for request in self.waiting if request.state is State.PREFILLING]

    @property
    def prefilled(self) -> list[Request]:
        """The requests that wait for a row, in the order in which they get one."""
        return [request for request in self.batch_of if request.state is State.PREFILLED]

    @property
    def answering(self) -> list[Request]:
        """The requests that are decoded, and those whose first token is on its way."""
        held = *self.first_tokens, *self.batch_of, *self.verifying
        return [each for each in held if each.state is not State.PREFILLED]

    @property
    def is_read(self) -> bool:
        """Whether somebody waits for the next token of an answer."""
        return any(request.interactive for request in self.answering)

    @property
    def idle(self) -> list[str]:
        """The kinds of the batches that have no request, and will not have one of those that are prefilled."""
        busy = list(self.batch_of.values())
        return [kind for kind, batch in self.batches.items() if batch not in busy]

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands, and release its row."""
        if request in self.batch_of:
            batch = self.batch_of.pop(request)
            if request.state is not State.PREFILLED:
                batch.release(request)
        elif request in self.first_tokens:
            del self.first_tokens[request]
        elif request in self.guesses:
            self._end_guesses(request)
        else:
            self.waiting.remove(request)

    def _end_guesses(self, request: Request) -> None:
        guesses = self.guesses.pop(request, None)
        if guesses and not guesses.done:
            self.end(guesses)

    def end(self, request: Request, error: Exception | None = None) -> None:
        if error is not None:
            self.check_alike(error)
        self.remove(request)
        request.finish(error)

    def restart(self, requests: list[Request]) -> None:
        """Have requests that have no row wait again, before the others of their clients."""
        left = [request for request in requests if request.state not in IN_QUEUE]
        for request in left:
            self.first_tokens.pop(request, None)
            self.batch_of.pop(request, None)
            self._end_guesses(request)
        self.waiting.put_back(left)
        for request in requests:
            request.restart()

    def fail(self, request: Request, error: Exception) -> None:
        """End a request; out of memory beside others, have it try again when some of them are done."""
        self.check_alike(error)
        others = self.num_rows - (request in self.first_tokens)
        if isinstance(error, OUT_OF_MEMORY) and (others or any(each is not request for each in self.begun)):
            self.row_limit = others or 1
            self.restart([request])
        else:
            self.end(request, error)

    @contextmanager
    def fails_alone(self, request: Request) -> Iterator[None]:
        """End this request, and no other, with what is raised within."""
        try:
            yield
        except Exception as error:
            self.end(request, error)

    def abort(self, error: BaseException) -> None:
        """Fail all requests: a step was cut short, and may have left anything."""
        for request in self.taken:
            request.finish(own_error(error))
        while self.submitted:  # other threads may add to it meanwhile
            self.submitted.popleft().finish(own_error(error))
        for places in (self.waiting, self.first_tokens, self.guesses, self.batch_of):
            places.clear()
        for batch in self.batches.values():
            batch.clear()


def own_error(error: BaseException) -> BaseException:
    """Copy an error for one of several requests: threads that raise it add their own ways to it."""
    try:
        made = type(error)(*error.args)
    except Exception:  # it is made of other things than it shows
        made = RuntimeError(str(error))
    made.__cause__ = error
    return made
