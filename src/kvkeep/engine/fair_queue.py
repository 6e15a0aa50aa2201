"""The requests that wait, in the order they are prefilled: keys take turns."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from itertools import zip_longest

from kvkeep.engine.request import Request


class FairQueue:
    """One of every key, then the next of every key. A turn is a chunk: the key that had none for longest comes first.

    Within a key, those whose prefill has begun come first, then first come, first served.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, deque[Request]] = {}  # in the order in which they came
        self.turns: dict[str, int] = {}  # the number of the last turn of a key
        self.count = 0

    def __len__(self) -> int:
        """From any thread."""
        return self.count

    def __iter__(self) -> Iterator[Request]:
        keys = sorted(self.by_key, key=lambda key: self.turns.get(key, 0))
        queues = [sorted(self.by_key[key], key=lambda request: not request.started) for key in keys]
        return (each for turn in zip_longest(*queues) for each in turn if each is not None)

    def append(self, request: Request) -> None:
        self.by_key.setdefault(request.key, deque()).append(request)
        self.count += 1

    def put_back(self, requests: list[Request]) -> None:
        """Before the others of their keys."""
        for request in reversed(requests):
            self.by_key.setdefault(request.key, deque()).appendleft(request)
            self.count += 1

    def take_turn(self, request: Request) -> None:
        """A chunk of it is prefilled: its key is the last one now, also if this was its only request."""
        self.turns[request.key] = 1 + max(self.turns.values(), default=0)

    def remove(self, request: Request) -> None:
        queue = self.by_key[request.key]
        queue.remove(request)
        self.count -= 1
        if not queue:
            del self.by_key[request.key]
            self._forget()

    def _forget(self) -> None:
        """The turns of keys that have no request and would be the first: as those of new keys."""
        oldest = min((self.turns.get(key, 0) for key in self.by_key), default=sys.maxsize)
        self.turns = {key: turn for key, turn in self.turns.items() if turn >= oldest}

    def clear(self) -> None:
        self.by_key, self.turns, self.count = {}, {}, 0
