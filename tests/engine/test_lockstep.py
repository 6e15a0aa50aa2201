"""Engines of several processes make the same steps: here two of one process, each with a whole model."""

import threading
from contextlib import contextmanager
from queue import Queue

import psutil
import pytest
import tiny_chat
import torch
from serving import wait_until

import kvkeep
from kvkeep.engine.lockstep import OutOfStep
from kvkeep.errors import BadParameter, CacheMisuse, UnknownName
from kvkeep.model.tensor_parallel import Place

TEXT = "".join(chr(97 + i * i % 23) for i in range(300))
TALK = [{"role": "user", "content": TEXT[:120]}, {"role": "assistant", "content": TEXT[:90]}]
TALK = [*TALK, {"role": "user", "content": "why"}]
HOW = {"max_new_tokens": 6, "temperature": 0.9}


class End(Exception):
    pass


class EveryTenth:
    """A constraint: of all tokens, so many may follow."""

    def allowed(self):
        return torch.arange(258) % 10 == 3

    def advance(self, token):
        pass


class Parts:
    """What a constraint is made of in every process."""

    def __init__(self):
        self.made = 0

    def every_tenth(self):
        self.made += 1
        return EveryTenth()


@contextmanager
def two(memory=None, store=10**8):
    """-> an engine that leads, one that follows, their parts; what the second raised, and the first failed with"""
    engines = [kvkeep.Engine(*tiny_chat.retrieving(), "kvkeep", 64, memory=memory, prefix_cache=store) for _ in "ab"]
    parts, sent, raised, failed = [Parts(), Parts()], Queue(), [], []

    def receive():
        if (message := sent.get()) is None:
            raise End
        return message

    def follow():
        try:
            engines[1].follow(receive, parts=parts[1])
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=follow)
    engines[0].lead(sent.put, failed.append, parts=parts[0])
    thread.start()
    try:
        yield *engines, parts, raised, failed
    finally:
        engines[0].close()
        sent.put(None)
        thread.join()


def record(engine):
    """-> every request that joins, in their order"""
    waiting, found = engine._driver.scheduler.held.waiting, []
    append = waiting.append
    waiting.append = lambda request: (found.append(request), append(request))
    return found


def test_other_machines_cannot_meet_the_processes():
    meeting = Place(0, 2, "cpu").listen()
    listens = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [each.ip for each in listens if each.port == meeting.port] == ["127.0.0.1"]


@pytest.mark.slow
def test_the_follower_answers_what_the_leader_is_asked():
    """Methods, budgets, seeds, keys, chats with stored prefixes, exact answers, contexts, constraints; many threads."""
    with two(memory=900_000) as (leader, follower, parts, raised, failed):
        asked, told = record(leader), record(follower)
        text = leader.pin(TEXT, owner="a", method="snapkv+adakv", budget=50)
        wait_until(lambda: raised or list(follower.store.entries) == [text])
        others = {"method": "h2o"}, {"budget": 32}, {"cache_prefix": True}
        how = [{"owner": owner, **more} for owner in "ab" for more in others]
        how += [{"exact": True}, {"exact": True, "cache_prefix": True, "method": "h2o"}]
        how += [{"context": text, "owner": "a"}, {"method": "quest"}, {"constraint": parts[0].every_tenth}]
        prompts = [TALK if each.get("cache_prefix") else TEXT for each in how]
        handles = [
            leader.submit(prompt, seed=seed, **each, **HOW)
            for seed, (prompt, each) in enumerate(zip(prompts * 2, how * 2, strict=True))
        ]
        texts = [handle.result() for handle in handles]
        wait_until(lambda: raised or (len(told) == len(asked) and all(each.done for each in told)))
        assert not raised and not failed and [each.text for each in told] == [each.text for each in asked]
        assert {each.text for each in asked[1:]} == set(texts) and all(each.error is None for each in asked)
        assert [each.num_cached for each in told] == [each.num_cached for each in asked] and asked[-1].num_cached == 0
        assert max(each.num_cached for each in asked) >= 256 and parts[1].made == 2
        assert len({id(each.config) for each in told}) == len({id(each.config) for each in asked})
        assert [entry.id for entry in leader.store.entries.values()] == list(follower.store.entries)


def test_the_cancelled_are_dropped_and_texts_removed_by_all():
    with two() as (leader, follower, _, raised, failed):
        told, shared = record(follower), {"public": True, "method": "snapkv"}
        text, again = (leader.pin(TEXT, owner=key, **shared) for key in "ab")
        handle = leader.submit(TEXT, max_new_tokens=600)
        stream = iter(handle)
        next(stream)
        handle.cancel()
        wait_until(lambda: raised or (handle.done and told[-1].done))
        assert 0 < len(told[-1].answer.ids) == len(handle.request.answer.ids) < 600 and not told[-1].cancelled
        assert text == again
        leader.withdraw(leader.submit_pin(TEXT, owner="a", **shared).request)
        assert [len(leader.store.pinned_by(key)) for key in "ab"] == [1, 1]
        leader.unpin(text, owner="a")
        assert len(leader.store.entries) == 1
        leader.unpin(text, owner="b")
        assert len(leader.store.entries) == 0
        with pytest.raises(UnknownName):
            leader.unpin(text, owner="b")
        wait_until(lambda: raised or len(follower.store.entries) == 0)
        assert leader.submit(TEXT, **HOW).result() and not raised and not failed


def test_what_is_refused_is_refused_before_others_are_told():
    with two() as (leader, _, _, raised, failed):
        with pytest.raises(BadParameter):
            leader.submit(TEXT, method="snapkv", budget=-1)
        for call in (
            lambda: leader.read(TEXT),
            lambda: leader.generate(TEXT),
            lambda: leader.pin(TEXT, progress=print),
        ):
            with pytest.raises(CacheMisuse, match="none can keep a cache or report progress"):
                call()
        with pytest.raises(UnknownName):
            leader.submit("which?", context="x" * 32)
        assert leader.submit(TEXT, **HOW).result() and not raised and not failed


def test_processes_that_part_ways_do_not_go_on():
    """One that has other logits: no later than at its next word."""
    with two() as (leader, follower, _, raised, _):
        follower.model.lm_head.weight.data.mul_(-1)
        leader.submit(TEXT, max_new_tokens=6).result()
        wait_until(lambda: raised)
        assert isinstance(raised[0], OutOfStep) and "other requests, tokens or prefixes" in str(raised[0])


@pytest.mark.parametrize("place", ["prefill", "decode"])
def test_after_what_one_process_alone_meets_none_goes_on(place, monkeypatch):
    """Elsewhere, a request that runs out of memory fails alone, or begins again."""
    with two() as (leader, _, _, _, failed):
        scheduler = leader._driver.scheduler
        handle = leader.submit(TEXT, max_new_tokens=600)
        if place == "decode":
            wait_until(lambda: scheduler.held.batch_of)
        owner = scheduler.prefilling if place == "prefill" else next(iter(scheduler.held.batches.values()))

        def full(*_, **__):
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(owner, "_advance" if place == "prefill" else "launch", full)
        late = leader.submit(TEXT, max_new_tokens=5)
        wait_until(lambda: failed)
        assert isinstance(failed[0], OutOfStep) and "no memory" in str(failed[0])
        wait_until(lambda: handle.done and late.done)
        assert handle.request.error or late.request.error


def test_a_method_that_does_not_say_when_two_are_equal_is_one_object_everywhere():
    """Batches are told apart by methods' names."""
    with two() as (leader, follower, _, raised, _):
        told = record(follower)
        for _ in range(3):
            leader.submit(TEXT, **HOW, method="tova", budget=40).result()
        wait_until(lambda: raised or len(told) == 3)
        assert not raised and len({id(each.config.method) for each in told}) == 1


def test_memory_is_what_the_process_that_holds_most_has_left(monkeypatch):
    """Heads of one process may keep more than those of another."""
    engine = kvkeep.Engine(*tiny_chat.retrieving(), "kvkeep", 64, memory=900_000, prefix_cache=10**8, history=None)
    with engine:
        engine.submit(TEXT, **HOW).result()
        scheduler = engine._driver.scheduler
        (batch,) = scheduler.held.batches.values()
        left, slots, entry = scheduler.memory.cap.left, batch._slot_limit(), engine.store.text("", engine.pin(TEXT))
        for place in ("held_memory", "pooled_batch", "stored"):  # another one holds 1000 bytes more
            monkeypatch.setattr(f"kvkeep.engine.{place}.agree_on_least", lambda model, number: number - 1000)
        more = engine.store.text("", engine.pin(TEXT, public=True))
        engine.unpin(entry.id)
        engine.unpin(more.id)
        assert scheduler.memory.cap.left == left - 1000 and more.nbytes == entry.nbytes + 1000
        assert batch._slot_limit() < slots - 1000
