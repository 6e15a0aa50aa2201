"""Compressed prefixes: an answer is the same whether its prefix was found or computed; nobody finds another's."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING
from talk import SHORT, TALK, answered, say, turns

import kvkeep
from kvkeep.cache import serialize
from kvkeep.engine import memory
from kvkeep.engine.prompts import LEAST_PART, LONGEST_PART, cuts_of
from kvkeep.engine.store import Store
from kvkeep.engine.stored import nbytes_of
from kvkeep.errors import BadParameter, CacheMisuse, StoreFull, UnknownName
from kvkeep.storage import checkpoint

PLENTY = 10**9


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.retrieving()


def engine(chat, method="snapkv", budget=64, store=PLENTY, **options):
    return kvkeep.Engine(*chat, method, budget, prefix_cache=store, **{"history": None, **options})


@pytest.mark.core
@pytest.mark.parametrize("spec", [*EVICTING, *RETRIEVING, "snapkv+adakv", "snapkv+pyramid", "cake+prototypes"])
def test_every_turn_says_the_same_with_a_warm_store_and_an_empty_one(chat, spec):
    with engine(chat, spec, 96) as one:
        warm = turns(one, TALK[:3])
    for number, (said, request) in enumerate(warm):
        cold = answered(engine(chat, spec, 96), say(*said))
        assert cold.num_cached == 0 and cold.answer.ids == request.answer.ids and request.answer.ids
        assert (cold.kept_tokens, cold.kept_bytes) == (request.kept_tokens, request.kept_bytes)
        assert cold.selection == request.selection
        if number:
            before = warm[number - 1][1]
            stored = before.cuts[-1] if before.cuts else 0
            assert request.num_cached == stored and request.ids[: len(before.ids) - 1].equal(before.ids[:-1])
            assert stored == len(before.ids) - 1 or (before.whole_end or number == 1)  # but for the newest message


def test_what_was_stored_is_what_the_prefix_alone_gives(chat):
    """Nothing that came later took part in the selection."""
    with engine(chat) as one:
        answered(one, say(*TALK[:3]))
        kept = {len(entry.ids): entry.sequence for entry in one.store.entries.values()}
    request = answered(engine(chat), say(*TALK[:3]))
    assert sorted(kept) == list(request.cuts) and len(kept) == 2
    for count, stored in kept.items():
        alone = stored.config.new_sequence()
        assert alone.config.method.name == "kvkeep_context"  # no question is known of what is stored
        for start, end in pairwise((0, *[cut for cut in request.cuts if cut <= count])):
            alone.prefill(request.ids[:end])
            assert len(alone.token_ids) == end > start
        assert [alone.cache.kept(i) for i in range(2)] == [stored.cache.kept(i) for i in range(2)]


def test_two_texts_that_begin_alike_share_their_beginning(chat, monkeypatch):
    monkeypatch.setattr("kvkeep.engine.prompts.LONGEST_PART", 100)
    same = TALK[3] * 2
    with engine(chat) as one:
        first, second = (answered(one, same + end, cache_prefix=True) for end in ("first", "second"))
        assert (first.num_cached, second.num_cached) == (0, 300) and second.cuts == (100, 200, 300, 374)
        assert second.answer.ids == answered(engine(chat), same + "second", cache_prefix=True).answer.ids
        assert answered(one, same + "second").num_cached == 0  # nobody asked for parts
        assert answered(one, same + "second").selection == "exact" and second.selection == "running"
        ids = second.ids.tolist()
        assert answered(one, ids, cache_prefix=True).num_cached == 374
        assert answered(one, ids).num_cached == 0
        chat_at_once = answered(one, say(same), cache_prefix=False)
        assert chat_at_once.cuts == () and chat_at_once.selection == "exact"


def test_parts_end_where_the_tokens_before_say(monkeypatch):
    draw, end = torch.Generator().manual_seed(0), 7
    for _ in range(50):
        ids = torch.randint(0, 60, (int(torch.randint(1, 900, (1,), generator=draw)),), generator=draw)
        cuts = cuts_of(ids, end)
        assert all(int(ids[cut - 1]) == end for cut in cuts)
        assert all(b - a >= LEAST_PART for a, b in pairwise((0, *cuts))) and max(cuts, default=0) < len(ids)
        monkeypatch.setattr("kvkeep.engine.prompts.LONGEST_PART", 40)
        long = cuts_of(ids, end, True)
        assert all(b - a <= 40 for a, b in pairwise((0, *long, len(ids))))
        shorter = ids[: len(ids) // 2 + 1]
        for texts, whole in ((False, cuts), (True, long)):
            assert cuts_of(shorter, end, texts) == tuple(cut for cut in whole if cut < len(shorter))
    assert cuts_of(torch.arange(100), None) == () and LONGEST_PART > LEAST_PART


@pytest.mark.parametrize(
    "other",
    [{"owner": "b"}, {"method": "h2o"}, {"budget": 65}, {"method": "snapkv:window=16"}, {"cache_prefix": False}],
)
def test_other_keys_methods_and_budgets_find_nothing(chat, other):
    with engine(chat) as one:
        answered(one, say(*TALK[:3]), owner="a")
        assert answered(one, say(*TALK[:3]), owner="a").num_cached > 0
        assert answered(one, say(*TALK[:3]), **{"owner": "a"} | other).num_cached == 0


def test_another_storage_finds_nothing(chat):
    store = Store(PLENTY)
    answered(engine(chat, store=store), say(*TALK[:3]))
    assert answered(engine(chat, store=store, storage="int8"), say(*TALK[:3])).num_cached == 0
    assert answered(engine(chat, store=store, prefill_chunk_size=50), say(*TALK[:3])).num_cached == 0
    assert answered(engine(chat, store=store), say(*TALK[:3])).num_cached > 0


def test_a_store_is_of_one_model(chat):
    store = Store(PLENTY)
    engine(chat, store=store)
    with pytest.raises(CacheMisuse, match="another model"):
        engine((tiny_chat.model(512), chat[1]), store=store)


def test_what_a_request_does_with_a_stored_prefix_does_not_change_it(chat):
    with engine(chat) as one:
        want = answered(one, say(*TALK[:3])).answer.ids
        for _ in range(3):
            assert answered(one, say(*TALK[:3])).answer.ids == want


def prefixes(one, count, key=""):
    """Store so many."""
    for number in range(count):
        answered(one, begun(number), owner=key)


def begun(number):
    """A conversation of which one message is stored."""
    return say(f"{number:03d}" + TALK[0], "Yes.", "Why?")


def test_the_least_recently_used_leave_within_the_bytes(chat):
    with engine(chat, store=PLENTY) as one:
        prefixes(one, 1)
        size = one.store.nbytes
        (entry,) = one.store.entries.values()
        held = entry.sequence.cache.report()
        assert size == nbytes_of(entry.sequence) == held.bytes + held.index_bytes > held.bytes
    with engine(chat, store=int(3.5 * size)) as one:
        prefixes(one, 3)
        answered(one, begun(0))  # used again
        answered(one, begun(3))
        assert len(one.store.entries) == 3 and one.store.nbytes == 3 * size <= one.store.max_bytes
        found = {number: answered(one, begun(number)).num_cached > 0 for number in (0, 2, 3, 1)}
        assert found == {0: True, 2: True, 3: True, 1: False}
    with engine(chat, store=size - 1) as one:
        prefixes(one, 2)
        assert len(one.store.entries) == 0


def test_pinned_ones_stay(chat):
    with engine(chat, store=PLENTY) as one:
        one.pin(TALK[3])
        size = one.store.nbytes
    with engine(chat, store=2 * size) as one:
        first = one.pin(TALK[3])
        prefixes(one, 5)
        second = one.pin(TALK[3][1:])
        prefixes(one, 2)
        assert set(one.store.entries) == {first, second}
        with pytest.raises(StoreFull, match="the rest is pinned; remove others, or use a larger prefix_cache="):
            one.pin(TALK[3][2:])
        one.unpin(first)
        third = one.pin(TALK[3][2:])
        assert set(one.store.entries) == {second, third} and third != first and len(third) >= 32
        assert one.pin(TALK[3][2:]) == third and len(one.store.entries) == 2
        entry = one.store.entries[third]
        one.store.add("", entry.sequence)
        assert set(one.store.entries) == {second, third} and entry in one.store.pinned_by(""), (
            "also if it is stored again"
        )


@pytest.mark.parametrize("spec", ["kvkeep_context", "snapkv", "full", "tokenselect", "qllm"])
def test_a_question_about_a_pinned_text_is_contexts_answer(chat, spec):
    with engine(chat, spec, 96) as one:
        id = one.pin(TALK[3], owner="a", method=spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvkeep.engine.context.Context._warn", lambda *_: None)
            want = [one.read(TALK[3]).ask(question, **SHORT) for question in ("which?", "and why?")]
        for _ in range(2):
            found = [answered(one, question, owner="a", context=id) for question in ("which?", "and why?")]
            assert [each.text for each in found] == want
            assert found[0].num_cached == len(one.read(TALK[3]))
        assert answered(one, say("which?"), owner="a", context=id).text == want[0]
        for wrong in ({"owner": "b", "context": id}, {"owner": "a", "context": id + "x"}):
            with pytest.raises(UnknownName, match=f"no context '{wrong['context']}'"):
                one.submit("which?", **wrong)
        with pytest.raises(UnknownName):
            one.unpin(id, owner="b")
        with pytest.raises(BadParameter, match="one message"):
            one.submit(say(*TALK[:3]), owner="a", context=id)


def test_a_public_text_is_everybodys_and_goes_with_its_last_claim(chat):
    """Whoever stored it has a claim, removes that alone, and has it among its own."""
    with engine(chat) as one:
        id, again = (one.pin(TALK[3], owner=key, public=True) for key in "ab")
        assert id == again and [len(one.store.pinned_by(key)) for key in "abc"] == [1, 1, 0]
        for key in "ab":
            assert answered(one, "which?", owner="c", context=id).num_cached > 0
            with pytest.raises(UnknownName):
                one.unpin(id, owner="c")
            one.unpin(id, owner=key)
            with pytest.raises(UnknownName):
                one.unpin(id, owner=key)
        assert len(one.store.entries) == 0


@pytest.mark.parametrize(("keys", "public"), [("aa", False), ("aa", True), ("ab", True)])
def test_a_text_pinned_twice_is_there_until_both_are_withdrawn(chat, keys, public):
    """Also where one is withdrawn before the other, or its first step, is done; what is removed is gone at once."""
    with engine(chat) as one:
        with one._driver.lock:
            both = [one.submit_pin(TALK[3], owner=key, public=public) for key in keys]
        for handle in both:
            handle.result()
        id = both[0].request.pinned
        one.withdraw(both[0].request)
        assert both[1].request.pinned == id and one.store.text(keys[1], id, own=True)
        one.withdraw(one.submit_pin(TALK[3], owner=keys[1], public=public).request)
        assert one.store.text(keys[1], id, own=True)
        one.withdraw(both[1].request)
        assert not len(one.store.entries) and not one._driver.scheduler.held.num_requests
        one.unpin(max(one.pin(TALK[3], owner=keys[0], public=public) for _ in range(2)), owner=keys[0])
        assert not len(one.store.entries)


def test_without_a_store_nothing_is_pinned(chat):
    with pytest.raises(BadParameter, match="stores no prefixes"):
        kvkeep.Engine(*chat, "snapkv", 64).pin("text")
    with pytest.raises(BadParameter, match="prefix_cache=0"):
        engine(chat, store=0)


# on disk


@pytest.mark.parametrize("spec", EVICTING)
def test_a_restarted_engine_finds_what_was_saved(chat, spec, tmp_path):
    with engine(chat, spec, 96, Store(PLENTY, tmp_path)) as one:
        want, said = answered(one, say(*TALK[:3])), say(*TALK[:3], "next")
        longer = answered(one, [*said, {"role": "user", "content": TALK[1]}])
    with engine(chat, spec, 96, Store(PLENTY, tmp_path)) as one:
        assert one.store.nbytes > 0 and all(entry.sequence is None for entry in one.store.entries.values())
        again = answered(one, say(*TALK[:3]))
        assert again.num_cached == want.cuts[-1] > 200
        assert again.answer.ids == want.answer.ids
        assert answered(one, [*said, {"role": "user", "content": TALK[1]}]).answer.ids == longer.answer.ids


def test_a_pinned_text_is_found_after_a_restart_by_its_key_alone(chat, tmp_path):
    with engine(chat, "kvkeep_context", 64, Store(PLENTY, tmp_path)) as one:
        id = one.pin(TALK[3], owner="secret-a", method="snapkv", budget=48)
        want = answered(one, "which?", owner="secret-a", context=id)
    with engine(chat, "kvkeep_context", 64, Store(PLENTY, tmp_path)) as one:
        found = answered(one, "which?", owner="secret-a", context=id)
        assert found.answer.ids == want.answer.ids and found.config.method.name == "snapkv"
        assert found.kept_tokens == want.kept_tokens and found.config.budget == 48
        with pytest.raises(UnknownName):
            one.submit("which?", owner="secret-b", context=id)
        one.unpin(id, owner="secret-a")
    assert not list(tmp_path.iterdir())


def pinned_after_restart(chat, folder, **removed):
    """Restart, and remove the claims of these keys to these texts. -> the ids that a, b and c have before"""
    with engine(chat, store=Store(PLENTY, folder)) as one:
        found = {key: {entry.id for entry in one.store.pinned_by(key)} for key in "abc"}
        for key, id in removed.items():
            one.unpin(id, owner=key)
    return found


def test_claims_to_a_public_text_are_found_after_a_restart(chat, tmp_path):
    with engine(chat, store=Store(PLENTY, tmp_path)) as one:
        id = one.pin(TALK[3], owner="a", public=True)
    with engine(chat, store=Store(PLENTY, tmp_path)) as one:
        assert one.pin(TALK[3], owner="b", public=True) == one.pin(TALK[3], owner="c", public=True) == id
    assert pinned_after_restart(chat, tmp_path, b=id) == {"a": {id}, "b": {id}, "c": {id}}
    assert pinned_after_restart(chat, tmp_path, a=id) == {"a": {id}, "b": set(), "c": {id}}
    assert pinned_after_restart(chat, tmp_path, c=id) == {"a": set(), "b": set(), "c": {id}}
    assert not list(tmp_path.iterdir())


def test_a_public_text_that_two_processes_stored_is_both_keys_after_a_restart(chat, tmp_path):
    one, two = (engine(chat, store=Store(PLENTY, tmp_path)) for _ in range(2))
    with one, two:
        ids = [one.pin(TALK[3], owner="a", public=True), two.pin(TALK[3], owner="b", public=True)]
    assert pinned_after_restart(chat, tmp_path) == {"a": {ids[0]}, "b": {ids[1]}, "c": set()}


def test_a_folder_with_one_owner_of_a_text_is_read(chat, tmp_path):
    """As it was written before texts had claims."""
    with engine(chat, store=Store(PLENTY, tmp_path)) as one:
        id = one.pin(TALK[3], owner="a", public=True)
    tensors, facts = checkpoint.read(tmp_path / id)
    owners = facts["prefix"].pop("owners")
    checkpoint.write(tmp_path / id, tensors, facts | {"prefix": facts["prefix"] | {"owner": owners[0]}})
    assert pinned_after_restart(chat, tmp_path) == {"a": {id}, "b": set(), "c": set()}


def test_what_another_process_saved_since_is_found_by_its_id(chat, tmp_path):
    """By its owner alone; removed there, it is gone here."""
    with engine(chat, store=Store(PLENTY, tmp_path)) as one:
        early = engine(chat, store=Store(PLENTY, tmp_path))
        id = one.pin(TALK[0] * 3, owner="alice")
        one.store.flush()
        expected = one.submit("why", context=id, owner="alice", **SHORT).result()
        with early as other:
            with pytest.raises(UnknownName):
                other.submit("why", context=id, owner="bob", **SHORT)
            assert other.submit("why", context=id, owner="alice", **SHORT).result() == expected
            with pytest.raises(KeyError):
                other.store.text("alice", "../" + id)


def test_a_disk_is_read_before_a_step_and_the_device_is_nobody_elses_meanwhile(chat, tmp_path, monkeypatch):
    with engine(chat, store=Store(PLENTY, tmp_path)) as one:
        expected = answered(one, say(*TALK[:1], "So.", "why")).text
    with engine(chat, store=Store(PLENTY, tmp_path)) as other:
        read, restored, lock, seen = checkpoint.read, serialize.restored, other._driver.lock, []

        def is_held():
            """By a step, or by us: another thread cannot have it."""
            with ThreadPoolExecutor(1) as pool:
                free = pool.submit(lock.acquire, blocking=False).result()
                if free:
                    pool.submit(lock.release).result()
            return not free

        def reading(path):
            seen.append(("read", threading.current_thread() is threading.main_thread(), is_held()))
            return read(path)

        def restoring(*given):
            seen.append(("restored", threading.current_thread() is threading.main_thread(), is_held()))
            return restored(*given)

        monkeypatch.setattr(checkpoint, "read", reading)
        monkeypatch.setattr(serialize, "restored", restoring)
        request = answered(other, say(*TALK[:1], "So.", "why"))
        assert request.text == expected and request.num_cached
        assert seen == [("read", True, False), ("restored", True, True)]


def test_no_key_is_written(chat, tmp_path):
    with engine(chat, store=Store(PLENTY, tmp_path)) as one:
        one.pin(TALK[3], owner="sk-verysecret")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2 and not any(b"verysecret" in path.read_bytes() for path in files)


def test_a_damaged_one_is_skipped_and_others_are_found(chat, tmp_path):
    with engine(chat, store=Store(PLENTY, tmp_path)) as one:
        ids = [one.pin(TALK[3][k:]) for k in range(5)]
        want = answered(one, "which?", context=ids[0]).answer.ids
    tensors, facts = tmp_path / ids[1] / "cache.safetensors", tmp_path / ids[2] / "cache.json"
    tensors.write_bytes(tensors.read_bytes()[:-9])
    facts.write_text(facts.read_text()[:-50])
    shutil.move(tmp_path / ids[3], tmp_path / ("x" * 32))
    other = json.loads((tmp_path / ids[4] / "cache.json").read_text()) | {"sha256": ""}
    (tmp_path / ids[4] / "cache.json").write_text(json.dumps(other))
    draft = tmp_path / f".{ids[0]}-a1b2c3d4"
    draft.mkdir()
    with pytest.warns(UserWarning, match="a stored prefix is skipped") as told:
        one = engine(chat, store=Store(PLENTY, tmp_path))
    assert len(told) == 3 and set(one.store.entries) == set(ids[:2])
    assert not draft.exists()
    assert answered(one, "which?", context=ids[0]).answer.ids == want
    with pytest.warns(UserWarning, match="truncated or was changed"), pytest.raises(UnknownName):
        one.submit("which?", context=ids[1])
    one.close()


@pytest.mark.parametrize("name", [checkpoint.DESCRIPTION, checkpoint.TENSORS])
def test_a_pipe_in_the_folder_holds_nobody_up(chat, tmp_path, name):
    with engine(chat, store=Store(PLENTY, tmp_path)) as one:
        id = one.pin(TALK[3])
    (tmp_path / id / name).unlink()
    os.mkfifo(tmp_path / id / name)
    found = []

    def ask():
        with engine(chat, store=Store(PLENTY, tmp_path)) as one:
            try:
                one.submit("which?", context=id)
            except UnknownName as error:
                found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    with pytest.warns(UserWarning, match="a stored prefix is skipped: .*not a regular file"):
        thread.start()
        thread.join(60)
    assert found


FORGED = [
    {"nbytes": -(10**15)}, {"nbytes": True}, {"ids": ["a"]}, {"ids": None}, {"cuts": [-1]}, {"cuts": "ab"}, {"text": 7},
    {"pinned": 1}, {"owners": []}, {"owners": [7]}, {"owners": "ab"}, {"owners": ["a", "b"]}, {"frozen": None},
]  # fmt: skip


def forge(path, changes):
    """With a checksum that fits."""
    tensors, facts = checkpoint.read(path)
    length = len(facts["prefix"]["ids"])
    changes = {name: value * length if value == ["a"] else value for name, value in changes.items()}
    checkpoint.write(path, tensors, facts | {"prefix": facts["prefix"] | changes})


def test_what_no_engine_saves_is_skipped_and_links_lead_where_they_may(chat, tmp_path):
    with engine(chat, store=Store(PLENTY, tmp_path)) as one:
        good, *ids = [one.pin(TALK[3][k:]) for k in range(1 + len(FORGED))]
        want, size = answered(one, "which?", context=good).answer.ids, one.store.text("", good).nbytes
    for id, changes in zip(ids, FORGED, strict=True):
        forge(tmp_path / id, changes)
    forge(tmp_path / good, {"nbytes": 1})
    (tmp_path / ("z" * 32)).symlink_to(tmp_path / "nowhere")
    (tmp_path / ("y" * 32)).symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.warns(UserWarning, match="a stored prefix is skipped") as told:
        one = engine(chat, store=Store(PLENTY, tmp_path))
    assert set(one.store.entries) == {good} and len(told) == len(ids) + 2
    assert answered(one, "which?", context=good).answer.ids == want
    assert one.store.nbytes == size  # measured, whatever the file said
    one.close()


def test_what_another_model_saved_is_left_alone(chat, tmp_path):
    with engine(chat, store=Store(PLENTY, tmp_path)) as one:
        id = one.pin(TALK[3])
    other = engine((tiny_chat.model(512), chat[1]), store=Store(PLENTY, tmp_path))
    assert len(other.store.entries) == 0 and (tmp_path / id).exists()


def test_evicted_ones_leave_the_disk(chat, tmp_path):
    with engine(chat) as one:
        prefixes(one, 1)
        size = one.store.nbytes
    with engine(chat, store=Store(2 * size, tmp_path)) as one:
        prefixes(one, 5)
        one.store.flush()
        assert {path.name for path in tmp_path.iterdir()} == set(one.store.entries) and len(one.store.entries) == 2
    with engine(chat, store=Store(size, tmp_path)) as one:
        assert len(one.store.entries) == 1 and len(list(tmp_path.iterdir())) == 1
        assert answered(one, begun(4)).num_cached > 0  # the newest


def test_a_full_disk_costs_no_answer(chat, tmp_path, monkeypatch, recwarn):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvkeep.storage.checkpoint.save_file", full)
    with engine(chat, store=Store(PLENTY, tmp_path)) as one:
        told = []
        monkeypatch.setattr("kvkeep.engine.store.warnings.warn", lambda text, **_: told.append(text))
        answered(one, say(*TALK[:3]))
        one.store.flush()
        assert told and all("could not be saved" in text and "No space" in text for text in told)
        assert answered(one, say(*TALK[:3])).num_cached > 0 and not list(tmp_path.iterdir())


def test_memory_caps_the_store_too(chat):
    cap = memory.row_bytes(chat[0], 900)
    with engine(chat, store=PLENTY, memory=cap) as one:
        held = tiny_chat.held_after_steps(one)
        prefixes(one, 12)
        assert 0 < one.store.nbytes < cap and len(one.store.entries) < 12
        answered(one, TALK[3] * 2, method="full")  # the store makes room
        assert len(one.store.entries) < 5
    assert 0.5 * cap < max(held) <= cap


@pytest.mark.parametrize(("spec", "used"), [("snapkv", "kvkeep_context"), ("knorm", "knorm"), ("full", "full")])
def test_nothing_of_the_newest_message_is_evicted(chat, spec, used):
    """What was said before is kept by a method that needs no question, unless a request names one."""
    with engine(chat, spec, 40) as one:
        request = answered(one, say(*TALK[:3]))
        newest = len(request.ids) - request.cuts[-1]
        assert request.config.method.name == used and newest > 64
        assert request.kept_tokens == (len(request.ids) if spec == "full" else 40 + newest)
        named = answered(one, say(*TALK[:3]), method="snapkv")
        assert named.config.method.name == "snapkv" and named.kept_tokens < 50
