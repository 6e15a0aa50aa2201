"""A thread that works for its owners in turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class TurnThread:
    """Runs one piece of work of every owner, then the next of every owner. What is cancelled before is skipped."""

    def __init__(self, name: str) -> None:
        self.by_owner: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # the owner whose turn it is first
        self.lock = threading.Lock()
        self.thread = ThreadPoolExecutor(1, name)

    def submit(self, owner: str, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self.lock:
            self.by_owner.setdefault(owner, deque()).append((future, work))
        self.thread.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        """Do the first work of the owner whose turn it is, which then is the last one."""
        with self.lock:
            owner = next(iter(self.by_owner))
            queue = self.by_owner.pop(owner)
            future, work = queue.popleft()
            if queue:
                self.by_owner[owner] = queue
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def close(self) -> None:
        """Wait until all that was submitted is done."""
        self.thread.shutdown()
