"""The requests that wait, in the order they are prefilled: keys take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, zip_longest

from kvkeep.engine.request import Request


class FairQueue:
    """Those whose prefill has begun come first, then one of every key, then the next of every key.

    Within a key, first come, first served. Whoever does not fit yet stays where it is: nobody overtakes it, but those
    whose turn came before.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, deque[Request]] = {}  # in the order of their turns
        self.count = 0

    def __len__(self) -> int:
        """From any thread."""
        return self.count

    def __iter__(self) -> Iterator[Request]:
        queues = self.by_key.values()
        begun = [each for queue in queues for each in queue if each.started]
        turns = zip_longest(*([each for each in queue if not each.started] for queue in queues))
        return chain(begun, (each for turn in turns for each in turn if each is not None))

    def append(self, request: Request) -> None:
        self.by_key.setdefault(request.key, deque()).append(request)
        self.count += 1

    def put_back(self, requests: list[Request]) -> None:
        """Before the others of their keys."""
        for request in reversed(requests):
            self.by_key.setdefault(request.key, deque()).appendleft(request)
            self.count += 1

    def take_turn(self, request: Request) -> None:
        """Its prefill begins: its key is the last one now."""
        self.by_key[request.key] = self.by_key.pop(request.key)

    def remove(self, request: Request) -> None:
        queue = self.by_key[request.key]
        queue.remove(request)
        self.count -= 1
        if not queue:
            del self.by_key[request.key]

    def clear(self) -> None:
        self.by_key, self.count = {}, 0
