"""Many keys in one engine with a store and a cap: each answer is that of an engine of its own, memory within bounds.

Four threads; chats that grow, and contexts; many methods, with and without seeds; some are cancelled.
"""

import random
import threading

import pytest
import tiny_chat
from test_scheduler import assert_free

import kvkeep
from kvkeep.engine import memory
from kvkeep.engine.store import Store

THREADS, TALKS, TURNS = 4, 12, 4
METHODS = [
    ("snapkv", 64), ("snapkv", 80), ("kvkeep", 64), ("h2o", 48), ("tova", 48), ("streamingllm", 48), ("full", None),
    ("chunkkv", 64), ("protokv", 64), ("snapkv+adakv", 64), ("tokenselect", 96), ("clusterkv", 96), ("kvzip", 64),
]  # fmt: skip


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.retrieving()


def message(luck):
    return "".join(luck.choice("abcdefgh. ") for _ in range(luck.choice([5, 40, 90, 160])))


def draw(luck):
    """How one request is asked for."""
    method, budget = luck.choice(METHODS)
    sampled = luck.choice([{}, {"temperature": 1.0, "seed": luck.randint(0, 3)}])
    logprobs = luck.choice([{}, {"logprobs": 2}])
    return {"method": method, "budget": budget, "max_new_tokens": luck.randint(1, 8), **sampled, **logprobs}


class Talker(threading.Thread):
    """Chats whose history is sent again with every turn; some turns are cancelled and asked once more."""

    def __init__(self, engine, number, pinned):
        super().__init__()
        self.engine, self.luck, self.pinned = engine, random.Random(number), pinned
        self.found, self.errors, self.cached = [], [], 0

    def run(self):
        try:
            for _ in range(TALKS):
                self.talk(f"key {self.luck.randint(0, 3)}", draw(self.luck))
        except BaseException as error:  # noqa: BLE001
            self.errors.append(error)

    def talk(self, key, how):
        said = [{"role": "user", "content": message(self.luck)}]
        for _ in range(self.luck.randint(1, TURNS)):
            if self.luck.random() < 0.2:
                self.leave(self.engine.submit(said, owner=key, **how))
            request = self.ask(said, key, how)
            self.cached += request.num_cached
            said = [*said, {"role": "assistant", "content": request.text}]
            said += [{"role": "user", "content": message(self.luck)}]
        if self.luck.random() < 0.5:
            about = {name: how[name] for name in how if name not in ("method", "budget")}
            self.ask(message(self.luck) + "?", key, about | {"context": self.pinned[key]})

    def leave(self, handle):
        """At once, or after the first text."""
        if self.luck.random() < 0.5:
            next(iter(handle), None)
        handle.cancel()
        assert handle.done

    def ask(self, prompt, key, how):
        handle = self.engine.submit(prompt, owner=key, **how)
        handle.result()
        self.found.append((prompt, key, how, handle.request.answer.ids, handle.request.logprobs))
        return handle.request


def watch(engine):
    """-> the most bytes held after any step, and stored"""
    scheduler, store, most = engine._driver.scheduler, engine.store, {"held": 0, "stored": 0}
    step = scheduler.step

    def watched():
        step()
        most["held"] = max(most["held"], scheduler.memory.held_bytes)
        most["stored"] = max(most["stored"], store.nbytes)

    scheduler.step = watched
    return most


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.parametrize("history", [None, "host"])
def test_every_answer_is_that_of_an_engine_of_its_own(chat, tmp_path, history):
    model, _ = chat
    cap, stored = memory.row_bytes(model, 2600), memory.row_bytes(model, 900)
    store, keys = Store(stored, tmp_path), [f"key {number}" for number in range(4)]
    luck = random.Random(9)
    texts = {key: message(luck) * 3 + "the text" for key in keys}
    how = {"history": history, "memory": cap, "prefix_cache": store, "max_rows": 6}
    with kvkeep.Engine(*chat, "snapkv", 64, **how) as engine:
        most = watch(engine)
        pinned = {key: engine.pin(text, owner=key, method="h2o", budget=60) for key, text in texts.items()}
        talkers = [Talker(engine, number, pinned) for number in range(THREADS)]
        for each in talkers:
            each.start()
        for each in talkers:
            each.join()
        assert not any(each.errors for each in talkers), [each.errors for each in talkers]
        with engine._driver.lock:  # the last answer is there before its step is over
            assert not engine._driver.scheduler.held.num_requests and engine.num_waiting == 0
            assert_free(engine._driver.scheduler)
        assert 0.5 * cap < most["held"] <= cap and most["stored"] <= stored
        assert history or 0.8 * stored < most["stored"]
        store.flush()
        assert {path.name for path in tmp_path.iterdir()} - {"history"} <= set(store.entries)
        assert set(pinned.values()) <= set(store.entries)
    assert sum(each.cached for each in talkers) > 2000
    answers = [found for each in talkers for found in each.found]
    assert len(answers) > 100
    for prompt, key, how, ids, logprobs in answers:
        alone = kvkeep.Engine(*chat, "snapkv", 64, prefix_cache=10**9, history=history)
        if "context" in how:
            how = how | {"context": alone.pin(texts[key], method="h2o", budget=60)}
        handle = alone.submit(prompt, **how)
        handle.result()
        assert handle.request.answer.ids == ids, (key, how)
        assert [each.token for each in logprobs] == (ids if "logprobs" in how else [])
        for found, want in zip(logprobs, handle.request.logprobs, strict=True):
            assert found.logprob == pytest.approx(want.logprob, abs=1e-6)
