"""A thread that works for its owners in turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class TurnThread:
    """Runs one piece of work of every owner, then the next of every owner. What is cancelled before is skipped."""

    def __init__(self, name: str) -> None:
        self.by_owner: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # the owner whose turn it is first
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, owner: str, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self.changed:
            self.by_owner.setdefault(owner, deque()).append((future, work))
            self.changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.by_owner or self.closed)
                if not self.by_owner:
                    return
                future, work = self._next()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]]:
        """Take the first of the owner whose turn it is, which then is the last one."""
        owner = next(iter(self.by_owner))
        queue = self.by_owner.pop(owner)
        found = queue.popleft()
        if queue:
            self.by_owner[owner] = queue
        return found

    def close(self) -> None:
        """Wait until all that was submitted is done."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()
