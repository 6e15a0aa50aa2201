"""The requests that wait, in the order they are prefilled: clients take turns."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from itertools import zip_longest

from kvkeep.engine.request import Request


class FairQueue:
    """Takes one request of every client, then the next of every client.

    A turn is a chunk: the client that had none for longest comes first. Within a client, those whose prefill has begun
    come first, then first come, first served.
    """

    def __init__(self) -> None:
        self.by_client: dict[str, deque[Request]] = {}  # in the order in which they came
        self.turns: dict[str, int] = {}  # the number of the last turn of a client
        self.count = 0

    def __len__(self) -> int:
        """The number of requests, from any thread."""
        return self.count

    def __iter__(self) -> Iterator[Request]:
        clients = sorted(self.by_client, key=lambda client: self.turns.get(client, 0))
        queues = [sorted(self.by_client[each], key=lambda request: not request.started) for each in clients]
        return (each for turn in zip_longest(*queues) for each in turn if each is not None)

    def append(self, request: Request) -> None:
        self.by_client.setdefault(request.client, deque()).append(request)
        self.count += 1

    def put_back(self, requests: list[Request]) -> None:
        """Put requests before the others of their clients."""
        for request in reversed(requests):
            self.by_client.setdefault(request.client, deque()).appendleft(request)
            self.count += 1

    def take_turn(self, request: Request) -> None:
        """Make its client the last one: a chunk of it is prefilled. This holds also if it was the only request."""
        self.turns[request.client] = 1 + max(self.turns.values(), default=0)

    def remove(self, request: Request) -> None:
        queue = self.by_client[request.client]
        queue.remove(request)
        self.count -= 1
        if not queue:
            del self.by_client[request.client]
            self._forget()

    def _forget(self) -> None:
        """Forget the turns of clients that have no request and would be the first, as new clients are."""
        oldest = min((self.turns.get(client, 0) for client in self.by_client), default=sys.maxsize)
        self.turns = {client: turn for client, turn in self.turns.items() if turn >= oldest}

    def clear(self) -> None:
        self.by_client, self.turns, self.count = {}, {}, 0
