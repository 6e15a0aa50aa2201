"""A progress bar on the terminal of whoever waits, silence in pipes, logs and notebooks; the times of an answer."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from threading import Timer
from typing import Any

DELAY_S = 1.0  # what is done sooner shows no bar


def is_watched() -> bool:
    """Whether standard error is a terminal; of the processes that share a model, the first one shows progress."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"


class Bar:
    """A line on standard error that says what is being done and for how long. It is removed when it stops."""

    def __init__(self, text: str, total: int | None = None, delay: float | None = None) -> None:
        """Show nothing if nobody watches. total: of what `update` counts; None: it is not known."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.is_shown = is_watched()
        console = Console(stderr=True, force_terminal=self.is_shown or None)
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20),
            TimeElapsedColumn(), TimeRemainingColumn(),
            console=console, transient=True, redirect_stdout=False, disable=not self.is_shown,
        )  # fmt: skip
        self._task = self._progress.add_task(text, total=total)
        self._delay = DELAY_S if delay is None else delay
        self._starter = Timer(self._delay, self._progress.start)

    def update(self, text: str | None = None, done: int | None = None, total: int | None = None) -> None:
        self._progress.update(self._task, description=text, completed=done, total=total)

    def stop(self) -> None:
        """Remove the line, or never show it."""
        if self.is_shown:
            self._starter.cancel()
            if self._delay:
                self._starter.join()  # it may be about to start
            self._progress.stop()

    def __enter__(self) -> Bar:
        if self.is_shown:
            self._starter.start() if self._delay else self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


class AnswerTimer:
    """Measures the times of the first and the last text of an answer."""

    def __init__(self) -> None:
        self.started = self.first = self.last = time.perf_counter()

    def watch(self, texts: Iterable[str]) -> Iterator[str]:
        """Pass the texts on, and note when each came."""
        for number, text in enumerate(texts):
            self.last = time.perf_counter()
            self.first = self.first if number else self.last
            yield text

    @property
    def first_token_s(self) -> float:
        return self.first - self.started

    def rate(self, tokens: int) -> float | None:
        """Tokens per second after the first."""
        return (tokens - 1) / (self.last - self.first) if tokens > 1 and self.last > self.first else None
