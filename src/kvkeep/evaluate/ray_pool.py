"""The same work on Ray: on the cores or GPUs of this machine, or on a cluster, where workers may be lost on the way."""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any, TypeVar

import torch

from kvkeep.errors import BadInput, BadParameter, MissingExtra

Item = TypeVar("Item")
Result = TypeVar("Result")
LOSSES = 3  # workers one item, or the loading of the model, may cost before it is to blame
AHEAD = 4  # items for each worker that may be answered before their turn
PATIENCE = 300  # seconds without a single worker before that is said
STORE = 100 * 2**20  # bytes of shared memory for an embedded Ray, which carries prompts and rows, never a model


def on_ray(
    address: str | None,
    make: Callable[[], Callable[[Item], Result]],
    items: Sequence[Item],
    workers: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Iterator[Result]:
    """Results in the order of the items, whichever worker had them and however often one was lost.

    No address: a Ray of its own on this machine. On a cluster, every node must have kvkeep installed.
    """
    if not items:
        return
    ray = check_ray()
    with _connected(ray, address):
        resources, room = _room(ray.nodes(), torch.get_num_threads())
        if workers is not None and not 1 <= workers <= room:
            raise BadParameter(f"workers={workers}, but Ray has room for {room}; use 1 to {room}.")
        team = _Team(ray, resources, make, items, say or (lambda text: None))
        try:
            yield from team.results(min(workers or room, len(items)))
        finally:
            team.dismiss()


class _Worker:
    """One process with the model in it."""

    def load(self, make: Callable[[], Callable[[Any], Any]], threads: int) -> None:
        torch.set_num_threads(threads)  # as many as the driver has: sums split otherwise may round otherwise
        self.answer_one = make()

    def answer(self, item: Any) -> Any:
        return self.answer_one(item)


class _Team:
    """Who does what. A worker is given nothing before it has loaded, so one that finds no room holds nothing up."""

    def __init__(self, ray: Any, resources: dict[str, int], make: Any, items: Sequence, say: Callable) -> None:
        self.ray, self.make, self.items, self.say = ray, make, items, say
        self.kind = ray.remote(max_restarts=0, **resources)(_Worker)
        self.idle: list[Any] = []
        self.busy: dict[Any, tuple[Any, int | None]] = {}  # task -> worker and the item it has; none while it loads
        self.queue = deque(range(len(items)))
        self.losses: Counter[int | None] = Counter()

    def results(self, workers: int) -> Iterator[Any]:
        for _ in range(workers):
            self._hire()
        early: dict[int, Any] = {}
        for turn in range(len(self.items)):
            self._hand_out(turn + AHEAD * workers)
            while turn not in early:
                early.update(self._gather())
                self._hand_out(turn + AHEAD * workers)
            yield early.pop(turn)

    def dismiss(self) -> None:
        for worker in [*self.idle, *(worker for worker, _ in self.busy.values())]:
            self.ray.kill(worker)

    def _hire(self) -> None:
        worker = self.kind.remote()
        self.busy[worker.load.remote(self.make, torch.get_num_threads())] = worker, None

    def _hand_out(self, end: int) -> None:
        while self.idle and self.queue and self.queue[0] < end:
            worker, index = self.idle.pop(), self.queue.popleft()
            self.busy[worker.answer.remote(self.items[index])] = worker, index

    def _gather(self) -> Iterator[tuple[int, Any]]:
        """Wait until a worker has something to tell. -> items answered"""
        ended, _ = self.ray.wait(list(self.busy), timeout=PATIENCE)
        if not ended and not self.idle and all(index is None for _, index in self.busy.values()):
            self.say("no worker is ready yet: either they still load, or Ray has no room for them now")
        for task in ended:
            try:
                result = self.ray.get(task)
            except self.ray.exceptions.RayTaskError as error:  # raised by the work itself
                raise error.cause from error
            except self.ray.exceptions.UnserializableException:  # too, but of a kind that does not travel
                raise
            except self.ray.exceptions.RayError as error:
                self._replace(task, error)
                continue
            worker, index = self.busy.pop(task)
            self.idle.append(worker)
            if index is None:
                del self.losses[None]
            else:
                yield index, result

    def _replace(self, task: Any, error: Exception) -> None:
        worker, index = self.busy.pop(task)
        self.ray.kill(worker)  # one that was only out of reach must not come back
        self.losses[index] += 1
        what = "loading the model" if index is None else f"item {index}"
        why = shorten(f"{type(error).__name__}: {error}", 400)
        if self.losses[index] == LOSSES:
            raise BadInput(f"{what} lost its worker {LOSSES} times, the last time so: {why}") from error
        self.say(f"{what} lost its worker and is given to a new one: {why}")
        if index is not None:
            self.queue.appendleft(index)
        self._hire()


def _room(nodes: Sequence[dict[str, Any]], threads: int) -> tuple[dict[str, int], int]:
    """What a worker takes, and how many fit: one for each GPU; without any, one for each `threads` CPUs of a node."""
    has = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = sum(int(node.get("GPU", 0)) for node in has)
    if gpus:
        return {"num_cpus": 0, "num_gpus": 1}, gpus
    cpus = [int(node.get("CPU", 0)) for node in has]
    share = max(1, min(threads, max(cpus)))
    return {"num_cpus": share}, max(1, sum(here // share for here in cpus))


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Leaves a Ray that was already there as it was."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own = {} if address else {"include_dashboard": False, "object_store_memory": STORE}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, ImportError) as error:
        raise BadInput(f"no Ray at {address!r}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def check_ray() -> Any:
    """The package, or how to get it."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("running on a cluster needs ray, which is missing: pip install 'kvkeep[ray]'") from error
    return ray
