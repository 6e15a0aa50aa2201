"""What goes wrong for one request, or with one stored prefix, does not touch the others."""

import pytest
import tiny_chat
import torch

import kvkeep
from kvkeep.cache import serialize
from kvkeep.engine.held_requests import FairQueue
from kvkeep.engine.sampling import SamplingRows
from kvkeep.engine.sequence import Sequence
from kvkeep.engine.store import Store
from kvkeep.errors import BadParameter, CacheMisuse
from kvkeep.storage.rows import Rows

TEXT = "".join(chr(97 + i * i % 23) for i in range(300))
TALK = [{"role": "user", "content": TEXT[:120]}, {"role": "assistant", "content": TEXT[:90]}]
TALK = [*TALK, {"role": "user", "content": "why"}]
NEW = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.retrieving()


def engine(chat, **options):
    return kvkeep.Engine(*chat, "snapkv", 64, history=None, **options)


def fails_once(monkeypatch, owner, name, error):
    """The next call of a function raises; later ones work."""
    works = getattr(owner, name)

    def failing(*args, **kwargs):
        monkeypatch.setattr(owner, name, works)
        raise error

    monkeypatch.setattr(owner, name, failing)


def test_one_that_cannot_be_sampled_fails_alone(chat, monkeypatch):
    with engine(chat) as one:
        want = one.generate(TEXT, max_new_tokens=40)
        fails_once(monkeypatch, SamplingRows, "logprobs", torch.OutOfMemoryError("no memory"))
        first = one.submit(TEXT, **NEW, logprobs=2)
        second = one.submit(TEXT, max_new_tokens=40)
        with pytest.raises(torch.OutOfMemoryError):
            first.result()
        assert second.result() == want and first.request.finish_reason == "error"


def test_a_prefix_that_cannot_be_copied_costs_no_answer(chat, monkeypatch):
    want = engine(chat, prefix_cache=10**8).submit(TALK, **NEW).result()
    with engine(chat, prefix_cache=10**8) as one:
        fails_once(monkeypatch, Sequence, "fork", torch.OutOfMemoryError("no memory"))
        assert one.submit(TALK, **NEW).result() == want
        assert one.submit(TALK, **NEW).result() == want and len(one.store.entries)


def test_a_row_that_could_not_be_filled_is_free_again(chat, monkeypatch):
    with engine(chat) as one:
        want = one.submit(TEXT, **NEW).result()
        fails_once(monkeypatch, Rows, "put", torch.OutOfMemoryError("no memory"))
        with pytest.raises(torch.OutOfMemoryError):
            one.submit(TEXT, **NEW).result()
        assert [one.submit(TEXT, **NEW).result() for _ in range(2)] == [want] * 2


class Panic(BaseException):
    """As a library in Rust raises it."""


def test_a_constraint_that_panics_ends_its_own_answer(chat):
    def make():
        raise Panic("index out of bounds")

    with engine(chat) as one:
        with pytest.raises(Panic):
            one.submit(TEXT, **NEW, constraint=make).result()
        assert one.submit(TEXT, **NEW).result() == one.generate(TEXT, **NEW)


def test_a_text_that_was_not_prefilled_to_its_end_is_no_context(chat):
    one = engine(chat, prefill_chunk_size=64, prefix_cache=10**8)
    driver = one._driver
    with pytest.raises(CacheMisuse, match="before the text was prefilled"):
        one.pin(TEXT, progress=lambda progress: driver.cancel(driver.scheduler.held.requests))
    assert len(one.store.entries) == 0 and one.pin(TEXT)


def test_nothing_of_others_in_a_folder_is_touched(chat, tmp_path):
    mine = [tmp_path / name for name in (".git", ".ssh", "notes", ".partial-x")]
    for each in mine:
        each.mkdir()
        (each / "config").write_text("kept")
    draft = tmp_path / f".{'a' * 32}-{'b' * 8}"
    draft.mkdir()
    with engine(chat, prefix_cache=Store(10**8, tmp_path)) as one:
        one.submit(TALK, **NEW).result()
    assert all((each / "config").read_text() == "kept" for each in mine) and not draft.exists()
    assert len(engine(chat, prefix_cache=Store(10**8, tmp_path)).store.entries) == len(one.store.entries) > 0


def test_saving_goes_on_after_an_error(chat, tmp_path, monkeypatch, recwarn):
    with engine(chat, prefix_cache=Store(10**8, tmp_path)) as one:
        fails_once(monkeypatch, serialize, "describe", torch.OutOfMemoryError("no memory"))
        one.pin(TEXT)
        one.pin(TEXT[:150])
        one.store.flush()
        assert [(tmp_path / id).exists() for id in one.store.entries] == [False, True]
    assert any("could not be saved" in str(each.message) for each in recwarn)


def test_what_two_processes_saved_of_one_prefix_is_one_entry(chat, tmp_path):
    stores = [Store(10**8, tmp_path) for _ in range(2)]
    engines = [engine(chat, prefix_cache=store) for store in stores]  # both open an empty folder
    for one in engines:
        one.submit(TALK, **NEW).result()
        one.close()
    again = engine(chat, prefix_cache=Store(10**8, tmp_path)).store
    assert len(again.entries) == len(again.by_place) == len(stores[0].entries) > 0
    while again.evict_oldest():
        pass
    assert len(again.entries) == 0 and not list(tmp_path.iterdir())


class Odd(RuntimeError):
    """One that cannot be made of what it shows."""

    def __init__(self, one, two):
        super().__init__(f"{one}{two}")


@pytest.mark.parametrize("error", [RuntimeError("broken"), Odd("bro", "ken"), torch.OutOfMemoryError("broken")])
def test_each_request_of_a_broken_step_has_an_error_of_its_own(chat, monkeypatch, error):
    with engine(chat) as one:
        fails_once(monkeypatch, one._driver.scheduler.prefilling, "next_chunks", error)
        with one._driver.lock:  # no step before all of them are there
            handles = [one.submit(TEXT, **NEW) for _ in range(3)]
        for handle in handles:
            with pytest.raises(RuntimeError, match="broken"):
                handle.result()
        found = [handle.request.error for handle in handles]
        assert len({id(each) for each in found}) == 3 and {each.__cause__ for each in found} == {error}
        assert one.submit(TEXT, **NEW).result()


@pytest.mark.parametrize("key", [["a"], 5, None])
def test_a_key_that_is_no_text_is_refused_before_others_know_of_it(chat, key):
    with engine(chat, prefix_cache=10**8) as one:
        other = one.submit(TEXT, **NEW)
        for ask in (one.submit, one.pin):
            with pytest.raises(BadParameter, match="owner=.*a text"):
                ask(TEXT, owner=key)
        assert other.result()
        with one._driver.lock:  # the answer is there before its step is over
            assert not one._driver.scheduler.held.num_requests


@pytest.mark.parametrize("cancels", [False, True])
def test_requests_that_could_not_join_the_others_end_with_an_error(chat, monkeypatch, cancels):
    """In a step, or when somebody else leaves between two steps."""
    with engine(chat) as one:
        with one._driver.lock:  # nobody else steps
            handles = [one.submit(TEXT, **NEW) for _ in range(3)]
            fails_once(monkeypatch, FairQueue, "append", TypeError("broken"))
            with pytest.raises(TypeError, match="broken"):
                handles[0].cancel() if cancels else one._driver.step()
        assert [str(handle.request.error) for handle in handles] == ["broken"] * 3
        assert not one._driver.scheduler.held.num_requests and one.submit(TEXT, **NEW).result()


def test_what_is_submitted_while_all_others_fail_ends_too(chat):
    """Another thread submits after the requests that fail were listed."""
    with engine(chat) as one, one._driver.lock:
        scheduler, late = one._driver.scheduler, []
        first = one.submit(TEXT, **NEW)
        finish = first.request.finish

        def slow(error):
            if not late:
                late.append(one.submit(TEXT, **NEW))
            finish(error)

        first.request.finish = slow
        scheduler.held.abort(RuntimeError("broken"))
        assert [str(each.request.error) for each in (first, *late)] == ["broken"] * 2
        assert not scheduler.held.num_requests
