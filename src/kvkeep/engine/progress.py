"""Progress of a prefill, told to a callback or shown on a terminal; and a clock that waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvkeep.terminal import Bar, is_watched


@dataclass(frozen=True)
class Progress:
    """How far a prompt is prefilled, in tokens."""

    done: int
    total: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def left(self) -> float:
        """Seconds left at this rate."""
        return (self.total - self.done) / self.rate if self.rate else 0.0

    def __str__(self) -> str:
        text = f"prefilled {self.done:,} of {self.total:,} tokens, {self.rate:,.0f}/s"
        minutes, seconds = divmod(round(self.left), 60)
        return text if self.done == self.total else f"{text}, {minutes}:{seconds:02} left"


ProgressCallback = Callable[[Progress], None] | None
ProgressOption = Callable[[Progress], None] | bool | None


@contextmanager
def watch(progress: ProgressOption, tokens: int) -> Iterator[ProgressCallback]:
    """Give what a prefill of so many tokens reports to: the callback, or a bar on a terminal; False: nothing."""
    if callable(progress):
        yield progress
    elif progress is False or not is_watched():
        yield None
    else:
        with Bar(f"prefill of {tokens:,} tokens", tokens) as bar:

            def report(progress: Progress) -> None:
                bar.update(done=progress.done)
                if progress.done == progress.total:
                    bar.stop()

            yield report


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
