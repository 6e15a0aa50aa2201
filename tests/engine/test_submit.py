"""Requests of many methods, budgets and keys in one engine: each says what it says alone; keys take turns."""

import threading

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING

import kvkeep
from kvkeep.engine import memory, pace, prefilling
from kvkeep.engine.driver import Driver
from kvkeep.engine.held_requests import FairQueue
from kvkeep.engine.prefilling import Prefilling
from kvkeep.engine.request import Request, State
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.errors import BadInput, BadParameter, CacheMisuse, QueueFull

TOOLS_TEMPLATE = (
    "{% if tools %}{% for t in tools %}<s>{{ t['function']['name'] }}</s>{% endfor %}{% endif %}" + tiny_chat.TEMPLATE
)
TEXT = "".join(chr(97 + i * i % 23) for i in range(300))


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.retrieving()


def engine(chat, method="snapkv", budget=64, **options):
    return kvkeep.Engine(*chat, method, budget, **options)


def test_a_prompt_is_a_text_messages_or_ids(chat):
    one = engine(chat)
    want = one.generate(TEXT, max_new_tokens=6)
    messages = [{"role": "user", "content": TEXT}]
    ids = one.encode(TEXT)
    for prompt in (TEXT, messages, ids, ids.tolist()):
        handle = one.submit(prompt, max_new_tokens=6)
        assert handle.result() == want
    with pytest.raises(CacheMisuse, match="cache was freed with it"):
        handle.cache  # noqa: B018
    longer = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why"}]
    assert one.submit(longer, max_new_tokens=6).result() == one.chat(longer, max_new_tokens=6)


def test_tools_go_to_the_chat_template(chat):
    one = kvkeep.Engine(chat[0], tiny_chat.tokenizer(TOOLS_TEMPLATE), "full")
    tool = {"type": "function", "function": {"name": "find", "parameters": {}}}
    asked = [{"role": "user", "content": "where"}]
    called = [*asked, {"role": "assistant", "content": None, "tool_calls": [{}]}, {"role": "tool", "content": "here"}]
    for messages, text in ((asked, "<s>find</s><s>where</s><s>"), ("where", "<s>find</s><s>where</s><s>")):
        handle = one.submit(messages, tools=[tool], max_new_tokens=2)
        handle.result()
        assert handle.request.ids.tolist() == one.tokenizer(text, add_special_tokens=False).input_ids
    one.submit(called, tools=[tool], max_new_tokens=2).result()
    with pytest.raises(BadParameter, match="tools= need a chat template"):
        kvkeep.Engine(chat[0], tiny_chat.tokenizer(None), "full").submit(asked, tools=[tool])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one"), ([{"role": "user"}], "message 0 has content None"), (torch.zeros(2, 2), "shape"),
        (torch.zeros(0, dtype=torch.int64), "shape"), ([5, 258], "0 to 257"), ([5, -1], "0 to 257"), ([5, "a"], "ids"),
        ([1.5], "messages"), ([5, 2.5], "torch.float32"), (5, "prompt=5 is a int; give a text, a list of messages"),
        ({"role": "user", "content": "x"}, "is a dict; give a text, a list of messages"), (None, "NoneType"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_are_refused(chat, prompt, message):
    with pytest.raises((BadInput, BadParameter), match=message):
        engine(chat).submit(prompt)


def test_a_chat_the_template_refuses_is_named(chat):
    words = tiny_chat.tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadInput, match="refuses these messages: roles must alternate"):
        kvkeep.Engine(chat[0], words, "full").submit([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("wrong", [{"method": "nokv"}, {"budget": 0}, {"method": "snapkv:nothing=1"}])
def test_a_method_or_budget_that_cannot_be_is_refused_at_once(chat, wrong):
    with pytest.raises((BadParameter, LookupError)):
        engine(chat).submit(TEXT, **wrong)


@pytest.mark.slow
def test_every_method_in_one_engine_at_a_time_says_what_it_says_alone(chat):
    specs = [(spec, 96 if n % 2 else 64) for n, spec in enumerate([*EVICTING, *RETRIEVING])]
    with engine(chat) as one:
        handles = [one.submit(TEXT, method=spec, budget=budget, max_new_tokens=5) for spec, budget in specs]
        found = [handle.result() for handle in handles]
    assert found == [engine(chat, spec, budget).generate(TEXT, max_new_tokens=5) for spec, budget in specs]


def test_one_config_for_all_requests_with_the_same_method_and_budget(chat, monkeypatch):
    monkeypatch.setattr("kvkeep.engine.engine.MOST_CONFIGS", 3)
    one = engine(chat)
    first, second = (one._config_for("h2o", 48) for _ in range(2))
    assert first is second and one._config_for(None, None) is one.config and one._config_for(None, 48).budget == 48
    for budget in range(50, 60):
        one._config_for("h2o", budget)
    assert len(one._configs) <= 3 and first.host_budget is one.config.host_budget


def waiting(config, keys, length=4):
    return [Request(config, torch.arange(5, 5 + length), Generation(1), owner=key) for key in keys]


def test_keys_take_turns(chat):
    config, queue = engine(chat).config, FairQueue()
    requests = waiting(config, "aaaabbc")
    for each in requests:
        queue.append(each)
    a1, a2, a3, a4, b1, b2, c1 = requests
    assert list(queue) == [a1, b1, c1, a2, b2, a3, a4] and len(queue) == 7
    a2.state = State.PREFILLING  # of a key, those that have begun come first
    queue.take_turn(a2)
    assert list(queue) == [b1, c1, a2, b2, a1, a3, a4]  # a turn is a chunk
    queue.take_turn(b1)
    queue.remove(a2)
    assert list(queue) == [c1, a1, b1, a3, b2, a4]
    queue.take_turn(c1)
    queue.remove(c1)
    late, new = waiting(config, "cd")
    queue.append(late)  # its key had the last turn
    queue.append(new)
    assert list(queue) == [new, a1, b1, late, a3, b2, a4]
    queue.put_back([a2])
    assert list(queue)[1] is a2 and len(queue) == 8
    for each in list(queue):
        queue.remove(each)
    assert not queue.requests and not queue.turns and len(queue) == 0


@pytest.mark.parametrize("reads", [True, False])
def test_a_second_request_of_a_key_waits_for_one_chunk_of_another(chat, reads, monkeypatch):
    """Whether an answer is decoded meanwhile, so that prompts are split, or not."""
    monkeypatch.setitem(pace.STEP_TOKENS, "cpu", 64)
    monkeypatch.setitem(prefilling.PACKED_TOKENS, "cpu", 64)
    one, chunks = engine(chat), []
    work = Scheduler(one.model, set())

    def submit(key, length):
        (each,) = waiting(one.config, [key], length)
        each.how, each.interactive = Generation(4), reads
        each.progress = lambda progress: chunks.append((key, progress.done))
        return work.submit(each)

    for _ in range(6):
        submit("long", 240)
    work.step()
    for _ in range(4):
        few = submit("few", 20)
        before = len(chunks)
        while not few.answer.ids:
            work.step()
        assert [key for key, _ in chunks[before:]].index("few") <= 1
    assert len(chunks) > 7 and work.held.waiting  # the others were still there


def test_a_key_with_one_request_does_not_wait_for_all_of_another(chat):
    one, done = engine(chat), []
    work = Scheduler(one.model, set(), max_rows=2)
    many = waiting(one.config, "a" * 12, 20)
    (few,) = waiting(one.config, "b", 20)
    for each in [*many, few]:
        each.how = Generation(4)
        each.notify = lambda each=each: each.done and done.append(each)
        work.submit(each)
    while work.held.num_requests:
        work.step()
    assert len(done) == 13 and done.index(few) < 3 and [each for each in done if each is not few] == many


@pytest.mark.slow
def test_one_that_does_not_fit_is_not_overtaken_forever(chat):
    one = engine(chat, "full", None)
    room = memory.row_bytes(one.model, 320)
    work = Scheduler(one.model, set(), max_rows=8, memory=room)
    large = Request(one.config, torch.arange(5, 155), Generation(4), owner="large", interactive=True)
    done, small = [], []

    def submit_small():
        each = Request(one.config, torch.arange(5, 30), Generation(6), owner=f"small {len(small)}", interactive=True)
        each.notify = lambda: each.done and done.append(each)
        small.append(work.submit(each))

    for _ in range(4):
        submit_small()
    work.step()
    large.notify = lambda: large.done and done.append(large)
    work.submit(large)
    for _ in range(200):
        submit_small()
        work.step()
        assert work.memory.held_bytes <= room
    assert large.done and large.error is None and done.index(large) < 12 and len(done) > 20


def test_too_many_are_refused(chat):
    one = engine(chat, max_waiting=3, max_rows=1)
    driver = Driver(Scheduler(one.model, set()))
    for each in waiting(one.config, "abc"):
        driver.submit(each, 3)
    with pytest.raises(QueueFull, match="3 requests wait already"):
        driver.submit(*waiting(one.config, "d"), 3)
    driver.submit(*waiting(one.config, "d"))  # a list of prompts is not refused
    with one._driver.lock:  # nothing is stepped
        for key in "abc":
            one.submit(TEXT, owner=key, max_new_tokens=2)
        with pytest.raises(QueueFull):
            one.submit(TEXT, owner="d")
    one.submit(TEXT, max_new_tokens=2).result() if one._driver.scheduler.held.num_waiting < 3 else None
    one.close()
    with pytest.raises(BadParameter, match="max_waiting=0"):
        engine(chat, max_waiting=0)


@pytest.mark.parametrize("spec", ["snapkv", "h2o", "full", "tokenselect", "snapkv+adakv"])
def test_memory_is_a_hard_cap_over_pools_and_prefills(chat, spec):
    model, words = chat
    how = {"max_new_tokens": 12}
    prompts = [TEXT[: 40 + 23 * n] for n in range(8)]
    others = ["snapkv", "h2o", "clusterkv", None]
    want = [engine(chat, others[n % 4] or spec, 64).generate(prompt, **how) for n, prompt in enumerate(prompts)]
    cap = memory.row_bytes(model, 450)
    with engine(chat, spec, 64, memory=cap) as one:
        held = tiny_chat.held_after_steps(one)
        asked = [(prompt, {"method": others[n % 4], "owner": str(n % 3)}) for n, prompt in enumerate(prompts)]
        handles = [one.submit(prompt, **each, **how) for prompt, each in asked]
        assert [handle.result() for handle in handles] == want
    assert 0.3 * cap < max(held) <= cap


def test_chats_of_many_threads(chat):
    with engine(chat, "snapkv", 64) as one:
        talks = [[{"role": "user", "content": TEXT[n : n + 50]}] for n in range(6)]
        want = [engine(chat, "snapkv", 64).chat(talk, max_new_tokens=5) for talk in talks]
        found = [""] * 6

        def work(n):
            found[n] = one.submit(talks[n], owner=str(n % 2), max_new_tokens=5).result().strip()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert found == want and not one._driver.scheduler.held.num_requests


def test_a_text_nobody_waits_for_is_given_up_between_the_passes_over_it(chat, monkeypatch):
    calls, between_passes = [], Prefilling._between_passes
    with engine(chat, "kvzip", 64, prefix_cache=10**7, history=None) as one:

        def leave(self, requests, active):
            calls.append(requests)
            requests[0].cancelled = True
            between_passes(self, requests, active)

        whole = one.submit_pin(TEXT * 3)
        whole.result()
        monkeypatch.setattr(Prefilling, "_between_passes", leave)
        handle = one.submit_pin(TEXT * 3 + "!")
        assert handle.result() == "" and handle.request.finish_reason == "cancelled" and not handle.request.pinned
        assert len(calls) == 1 and [each.id for each in one.store.pinned_by("")] == [whole.request.pinned]


def test_a_submitted_prompt_lets_others_pass(chat, monkeypatch):
    """On a CPU, where a forward pass over a long prompt takes seconds."""
    sizes, prefill = [], Prefilling.run

    def counted(self, chunks, active):
        sizes.extend(len(ids) for _, ids in chunks)
        prefill(self, chunks, active)

    monkeypatch.setattr(Prefilling, "run", counted)
    monkeypatch.setitem(prefilling.PACKED_TOKENS, "cpu", 64)
    with engine(chat, "snapkv", 64) as one:
        assert one.submit(TEXT, max_new_tokens=4).result() == engine(chat).generate([TEXT], max_new_tokens=4)[0]
    assert sizes[-1] > 300 > 64 >= max(sizes[:-1]) and sum(sizes[:-1]) == sizes[-1]
