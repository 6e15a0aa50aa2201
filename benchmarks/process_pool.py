"""Several processes on one device, each with the model: used by these scripts instead of Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from typing import Any

import torch

WAITS = (5, 15, 30, 60)  # seconds before an item is retried
worker: Callable[[Any], Any] | None = None  # of this process


def map_in_processes(
    make: Callable[[], Callable[[Any], Any]], workers: int
) -> Callable[[Sequence[Any]], Iterator[Any]]:
    """For `kvkeep.evaluate.grid.run`: results as they are finished, in any order, so that a killed run loses little."""

    def map_items(items: Sequence[Any]) -> Iterator[Any]:
        with get_context("spawn").Pool(workers, _start, (make,)) as pool:
            yield from pool.imap_unordered(_run, items)

    return map_items


def _start(make: Callable[[], Callable[[Any], Any]]) -> None:
    global worker
    torch.set_num_threads(1)
    worker = make()


def _run(item: Any) -> Any:
    """Processes share one device: free its memory after every item, and on OOM wait and retry."""
    assert worker is not None
    for wait in WAITS:
        try:
            return list(worker(item))
        except torch.OutOfMemoryError:
            pass  # the item's tensors are freed first
        finally:
            torch.cuda.empty_cache()
        time.sleep(wait)
    return list(worker(item))
