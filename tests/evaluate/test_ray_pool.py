"""A grid on Ray gives what a plain map gives, whatever happens to its workers."""

import os
import signal
import sys
import time
from collections import Counter

import psutil
import pytest
import torch

from kvkeep.errors import BadInput, BadParameter, MissingExtra
from kvkeep.evaluate.ray_pool import AHEAD, MAX_LOSSES, _actor_resources, map_on_ray

SOON = 60  # seconds in which a process must have started or ended


@pytest.fixture(scope="module")
def ray():
    """Not started; stopped when this module is through."""
    ray = pytest.importorskip("ray")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test
    yield ray
    ray.shutdown()


@pytest.fixture
def running(ray):
    """Two cores of Ray, shared by the tests that do not mind: starting takes seconds."""
    if not ray.is_initialized():
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    return ray


@pytest.fixture
def notes(tmp_path):
    """A file that workers write to, a line for each thing they did."""
    path = tmp_path / "notes"
    path.touch()
    return path


def note(notes, text):
    with notes.open("a") as file:
        file.write(f"{text}\n")


def until(condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_order_is_kept_and_no_worker_runs_too_far_ahead(running, notes):
    ahead = AHEAD * 2 - 1

    def answer(item):
        if item == 0:  # ends only when every other item that may be begun is through
            until(lambda: len(notes.read_text().split()) == ahead)
            time.sleep(0.3)
            assert len(notes.read_text().split()) == ahead
        note(notes, item)
        return item * item

    assert list(map_on_ray(None, lambda: answer, range(20), workers=2)) == [item * item for item in range(20)]
    assert Counter(map(int, notes.read_text().split())) == Counter(range(20))


def test_a_worker_loads_once_with_the_threads_of_the_driver(running, notes):
    def make():
        note(notes, "loaded")
        return lambda item: torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(3)  # more than there are cores: not what Ray would set
    try:
        assert list(map_on_ray(None, make, range(5))) == [3] * 5
    finally:
        torch.set_num_threads(before)
    assert notes.read_text().split() == ["loaded"]  # two cores have room for one such worker


@pytest.mark.parametrize("when", ["loading the model", "item 3"])
def test_a_killed_worker_is_replaced(running, notes, when):
    def die_once(now):
        if now == when and not notes.read_text():
            note(notes, "died")
            os.kill(os.getpid(), signal.SIGKILL)

    def make():
        die_once("loading the model")
        return answer

    def answer(item):
        die_once(f"item {item}")
        return item * item

    said = []
    workers = 1 if when == "loading the model" else 2  # another might do all the work before anybody asks
    found = map_on_ray(None, make, range(20), workers=workers, say=said.append)
    assert list(found) == [item * item for item in range(20)]
    assert notes.read_text() == "died\n"
    assert len(said) == 1 and said[0].startswith(f"{when} lost its worker")


@pytest.mark.slow
def test_an_item_that_kills_every_worker_is_named(running, notes):
    def answer(item):
        if item == 2:
            note(notes, "died")
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    results = map_on_ray(None, lambda: answer, range(4), workers=1)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(BadInput, match=f"item 2 lost its worker {MAX_LOSSES} times.*ActorDiedError"):
        next(results)
    assert notes.read_text().split() == ["died"] * MAX_LOSSES


@pytest.mark.slow
@pytest.mark.parametrize("where", ["load", "answer"])
def test_what_the_work_raises_is_raised_here_once(running, notes, where):
    def fail(here):
        if here == where:
            note(notes, os.getpid())
            raise BadInput("a question without an end")

    def make():
        fail("load")
        return lambda item: fail("answer")

    with pytest.raises(BadInput) as caught:
        list(map_on_ray(None, make, range(3), workers=1))
    assert type(caught.value) is BadInput and str(caught.value) == "a question without an end"
    (pid,) = map(int, notes.read_text().split())
    until(lambda: not alive(pid))


def test_a_ray_that_was_there_stays_without_our_workers(running):
    def answer(item):
        time.sleep(item and 600)
        return os.getpid()

    results = map_on_ray(None, lambda: answer, range(3), workers=1)
    pid = next(results)
    assert alive(pid)  # and busy with the next item
    results.close()
    until(lambda: not alive(pid))
    assert running.is_initialized()


def test_more_workers_than_room_are_refused(running):
    with pytest.raises(BadParameter, match="room for 2; use 1 to 2"):
        next(map_on_ray(None, lambda: str, range(9), workers=3))


@pytest.mark.slow
def test_a_ray_of_its_own_ends_with_it(ray):
    ray.shutdown()
    results = map_on_ray(None, lambda: lambda item: (os.getpid(), os.getppid()), range(50))
    pids = next(results)  # a worker and the node it runs on
    assert ray.is_initialized() and all(map(alive, pids))
    results.close()
    assert not ray.is_initialized()
    until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(
    ("nodes", "threads", "takes", "workers"),
    [
        ([{"CPU": 8.0}], 2, {"num_cpus": 2}, 4),
        ([{"CPU": 2.0}], 8, {"num_cpus": 2}, 1),
        ([{"CPU": 7.0}, {"CPU": 3.0}, {}], 4, {"num_cpus": 4}, 1),  # a worker does not span nodes
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}], 8, {"num_cpus": 0, "num_gpus": 1}, 3),
        ([{}], 4, {"num_cpus": 1}, 1),
    ],
)
def test_workers_are_as_many_as_fit(nodes, threads, takes, workers):
    gone = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}
    assert _actor_resources([gone, *({"Alive": True, "Resources": has} for has in nodes)], threads) == (takes, workers)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'kvkeep\[ray\]'"):
        next(map_on_ray(None, lambda: str, [1]))
    assert list(map_on_ray(None, lambda: str, [])) == []


@pytest.mark.slow
def test_the_same_rows_come_out_of_the_command(running, tmp_path, monkeypatch):
    """`kvkeep eval --ray`, with a worker killed midway, ends with the file `kvkeep eval` writes."""
    import tiny_chat
    from typer.testing import CliRunner

    from kvkeep.cli.app import app
    from kvkeep.evaluate import grid as module

    tiny_chat.model().save_pretrained(tmp_path / "model")
    tiny_chat.tokenizer().save_pretrained(tmp_path / "model")
    args = ["eval", "--tasks", "needle_number", "--model", str(tmp_path / "model"), "--length", "300,400", "--limit",
            "6", "--methods", "full,snapkv", "--budget", "80", "--device", "cpu", "--max-length", "600"]  # fmt: skip
    plain = CliRunner().invoke(app, [*args, "--out", str(tmp_path / "plain")])
    assert plain.exit_code == 0, plain.output
    workers = []

    def kill_one(done, total):
        mine = [each for each in psutil.Process().children(recursive=True) if "ray::_Actor" in each.name()]
        if mine and not workers:
            workers.append(mine[0])
            mine[0].kill()

    run = module.run
    monkeypatch.setattr(module, "run", lambda *of: run(*of[:4], kill_one, *of[5:]))
    there = CliRunner().invoke(app, [*args, "--out", str(tmp_path / "ray"), "--ray"])
    assert there.exit_code == 0, there.output
    assert (tmp_path / "ray" / "rows.jsonl").read_bytes() == (tmp_path / "plain" / "rows.jsonl").read_bytes()
    assert workers  # one was killed
