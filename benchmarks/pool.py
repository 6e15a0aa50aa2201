"""Several processes on one device, each with the model: what these scripts use where there is no Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from typing import Any

import torch

WAITS = (5, 15, 30, 60)  # seconds, before an item is tried again
answer_one: Callable[[Any], Any] | None = None  # of this process


def answers(make: Callable[[], Callable[[Any], Any]], workers: int) -> Callable[[Sequence[Any]], Iterator[Any]]:
    """For `kvkeep.evaluate.grid.run`: results as they come, in any order: a run that is stopped loses little."""

    def answer(items: Sequence[Any]) -> Iterator[Any]:
        with get_context("spawn").Pool(workers, _start, (make,)) as pool:
            yield from pool.imap_unordered(_answer, items)

    return answer


def _start(make: Callable[[], Callable[[Any], Any]]) -> None:
    global answer_one
    torch.set_num_threads(1)
    answer_one = make()


def _answer(item: Any) -> Any:
    """Processes share one device: what an item needed is given back, and a full device is waited for."""
    assert answer_one is not None
    for wait in WAITS:
        try:
            return list(answer_one(item))
        except torch.OutOfMemoryError:
            pass  # what the item held is let go of first
        finally:
            torch.cuda.empty_cache()
        time.sleep(wait)
    return list(answer_one(item))
