"""Items mapped over a pool of Ray actors, on this machine or a cluster; items of an actor that dies are retried."""

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
MAX_LOSSES = 3  # actors that may die on one item, or while loading the model
AHEAD = 4  # items per actor that may be finished before the next result is due
NO_ACTOR_WARNING_S = 300  # without a single actor that is ready
STORE = 100 * 2**20  # bytes of object store for an embedded Ray: prompts and rows, never a model


def map_on_ray(
    address: str | None,
    make: Callable[[], Callable[[Item], Result]],
    items: Sequence[Item],
    workers: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Iterator[Result]:
    """Results in the order of the items.

    No address: an embedded Ray on this machine. On a cluster, kvkeep must be installed on every node.
    """
    if not items:
        return
    ray = check_ray()
    with connected(ray, address):
        resources, room = _actor_resources(ray.nodes(), torch.get_num_threads())
        if workers is not None and not 1 <= workers <= room:
            raise BadParameter(f"workers={workers}, but Ray has room for {room}; use 1 to {room}.")
        pool = _ActorPool(ray, resources, make, items, say or (lambda text: None))
        try:
            yield from pool.results(min(workers or room, len(items)))
        finally:
            pool.kill()


class _Actor:
    """One process with the model in it."""

    def load(self, make: Callable[[], Callable[[Any], Any]], threads: int) -> None:
        torch.set_num_threads(threads)  # as the driver: another split of a sum may round differently
        self.work = make()

    def run(self, item: Any) -> Any:
        return self.work(item)


class _ActorPool:
    """An actor gets its first item after it has loaded the model, so one that cannot be placed delays no item."""

    def __init__(self, ray: Any, resources: dict[str, int], make: Any, items: Sequence, say: Callable) -> None:
        self.ray, self.make, self.items, self.say = ray, make, items, say
        self.kind = ray.remote(max_restarts=0, **resources)(_Actor)
        self.idle: list[Any] = []
        self.busy: dict[Any, tuple[Any, int | None]] = {}  # task -> actor and its item; None while it loads
        self.queue = deque(range(len(items)))
        self.losses: Counter[int | None] = Counter()

    def results(self, workers: int) -> Iterator[Any]:
        for _ in range(workers):
            self._start_actor()
        early: dict[int, Any] = {}
        for turn in range(len(self.items)):
            self._submit(turn + AHEAD * workers)
            while turn not in early:
                early.update(self._collect())
                self._submit(turn + AHEAD * workers)
            yield early.pop(turn)

    def kill(self) -> None:
        for actor in [*self.idle, *(actor for actor, _ in self.busy.values())]:
            self.ray.kill(actor)

    def _start_actor(self) -> None:
        actor = self.kind.remote()
        self.busy[actor.load.remote(self.make, torch.get_num_threads())] = actor, None

    def _submit(self, end: int) -> None:
        while self.idle and self.queue and self.queue[0] < end:
            actor, index = self.idle.pop(), self.queue.popleft()
            self.busy[actor.run.remote(self.items[index])] = actor, index

    def _collect(self) -> Iterator[tuple[int, Any]]:
        """Wait until a task ends. -> (index, result) of finished items"""
        ended, _ = self.ray.wait(list(self.busy), timeout=NO_ACTOR_WARNING_S)
        if not ended and not self.idle and all(index is None for _, index in self.busy.values()):
            self.say("no worker is ready yet: either they still load, or Ray has no room for them now")
        for task in ended:
            try:
                result = self.ray.get(task)
            except self.ray.exceptions.RayTaskError as error:  # raised by the work
                raise error.cause from error
            except self.ray.exceptions.UnserializableException:  # raised by the work, and cannot be pickled
                raise
            except self.ray.exceptions.RayError as error:
                self._replace(task, error)
                continue
            actor, index = self.busy.pop(task)
            self.idle.append(actor)
            if index is None:
                del self.losses[None]
            else:
                yield index, result

    def _replace(self, task: Any, error: Exception) -> None:
        actor, index = self.busy.pop(task)
        self.ray.kill(actor)  # it may only be unreachable, and must not come back
        self.losses[index] += 1
        what = "loading the model" if index is None else f"item {index}"
        why = shorten(f"{type(error).__name__}: {error}", 400)
        if self.losses[index] == MAX_LOSSES:
            raise BadInput(f"{what} lost its worker {MAX_LOSSES} times, the last time so: {why}") from error
        self.say(f"{what} lost its worker and is given to a new one: {why}")
        if index is not None:
            self.queue.appendleft(index)
        self._start_actor()


def _actor_resources(nodes: Sequence[dict[str, Any]], threads: int) -> tuple[dict[str, int], int]:
    """The resources of an actor, and how many fit: one per GPU; without GPUs, one per `threads` CPUs of a node."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = sum(int(node.get("GPU", 0)) for node in alive)
    if gpus:
        return {"num_cpus": 0, "num_gpus": 1}, gpus
    cpus = [int(node.get("CPU", 0)) for node in alive]
    each = max(1, min(threads, max(cpus)))
    return {"num_cpus": each}, max(1, sum(count // each for count in cpus))


@contextmanager
def connected(ray: Any, address: str | None) -> Iterator[None]:
    """A Ray that was initialized before stays so."""
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
