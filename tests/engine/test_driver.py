"""Many prompts through the engine: what each says alone, within host and device memory."""

import asyncio
import os
import subprocess
import sys
import threading
import time
import weakref
from unittest.mock import Mock

import pytest
import tiny_chat
import torch
from serving import wait_until

import kvkeep
from kvkeep.engine import batch, memory, pace, pooled_batch
from kvkeep.engine.packed_forward import PackedForward
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import BadInput, BadParameter, CacheMisuse

WORDS = tiny_chat.tokenizer()
TEXT = "".join(chr(97 + i * i % 23) + (". " if i % 29 == 0 else "") for i in range(300))


@pytest.mark.parametrize("spec", ["kvkeep", "snapkv", "full", "pyramidkv", "h2o", "infllm", "emllm", "sentencekv"])
@pytest.mark.slow
def test_the_engine_answers_many_as_it_answers_one(spec):
    model = tiny_chat.model().double()  # a batch rounds otherwise than a row: too little to change what is fetched
    prompts = ["".join(chr(97 + (i * i + n) % 23) for i in range(100 + 60 * n)) for n in range(5)]
    one, many = (kvkeep.Engine(model, WORDS, spec, 64) for _ in range(2))
    want = [one.generate(prompt, max_new_tokens=7) for prompt in prompts]
    assert many.generate(prompts, max_new_tokens=7, rows=2) == want and many.generate([]) == []
    drawn = {"max_new_tokens": 7, "temperature": 1.5, "seed": 4}
    assert many.generate(prompts, rows=3, **drawn) == [one.generate(prompt, **drawn) for prompt in prompts]


PROMPTS = ["".join(chr(97 + (i * i + n) % 23) for i in range(150)) for n in range(4)]


@pytest.fixture
def at_once(monkeypatch):
    """How many rows each pass had."""
    sizes, forward = [], PackedForward.__call__

    def counted(self, chunks, *how):
        if all(len(ids) == 1 for _, ids in chunks):
            sizes.append(len(chunks))
        return forward(self, chunks, *how)

    monkeypatch.setattr(PackedForward, "__call__", counted)
    return sizes


def living(monkeypatch):
    """Counts the engines that have read something, or are about to."""
    engines, make = weakref.WeakSet(), SequenceConfig.new_sequence

    def counted(self):
        engines.add(twin := make(self))
        return twin

    monkeypatch.setattr(SequenceConfig, "new_sequence", counted)
    return lambda: len(engines)


def precise(spec, **how):
    return kvkeep.Engine(tiny_chat.model().double(), WORDS, spec, 64, **how)


def test_no_more_prompts_are_read_than_the_host_can_hold(at_once, monkeypatch):
    engine = precise("clusterkv")
    want = [engine.generate(prompt, max_new_tokens=3) for prompt in PROMPTS]
    one = memory.row_bytes(engine.model, 153 + 3) / 0.8  # three words more than the prompt's, and the answer
    alive = living(monkeypatch)
    at_once.clear()
    monkeypatch.setattr(batch, "free_host_bytes", lambda: (2 - alive()) * one + 1)
    assert engine.generate(PROMPTS, max_new_tokens=3) == want and max(at_once) == 2
    monkeypatch.setattr(batch, "free_host_bytes", lambda: 0)
    at_once.clear()
    assert engine.generate(PROMPTS, max_new_tokens=3) == want and max(at_once) == 1
    monkeypatch.setattr(batch, "free_host_bytes", lambda: None)
    at_once.clear()
    assert engine.generate(PROMPTS, max_new_tokens=3) == want and max(at_once) == 4
    assert memory.free_host_bytes() is None or 2**20 < memory.free_host_bytes() < 2**50


def test_prompts_share_what_the_host_may_hold(at_once):
    want = precise("clusterkv").generate(PROMPTS, max_new_tokens=3)
    alone = precise("clusterkv")
    alone.generate(PROMPTS[0], max_new_tokens=3)
    limit = int(2.5 * alone.cache.host_budget.used_bytes)
    at_once.clear()
    engine = precise("clusterkv", host_limit=limit)
    assert engine.generate(PROMPTS, max_new_tokens=3) == want and max(at_once) == 2
    with pytest.raises(BadInput, match="prompt 0: offloaded tokens would take .* prompt 3: "):
        precise("clusterkv", host_limit=1000).generate(PROMPTS, max_new_tokens=3)


@pytest.mark.parametrize("spec", ["h2o+adakv", "clusterkv"])
def test_who_does_not_fit_on_the_device_waits(spec, at_once, monkeypatch):
    engine, forward = precise(spec), PackedForward.__call__
    want, scheduler = engine.generate(PROMPTS, max_new_tokens=5), engine._driver.scheduler

    def prefilling(self, chunks, *how):
        held = scheduler.held.num_rows + len(chunks)
        if any(len(ids) > 1 for _, ids in chunks) and held > 3:
            raise torch.OutOfMemoryError("no room")
        return forward(self, chunks, *how)

    def decoding(self, chunks, *how):
        if len(chunks) > 2 and all(len(ids) == 1 and len(each.token_ids) > 154 for each, ids in chunks):
            raise torch.OutOfMemoryError("no room for a pass")
        return forward(self, chunks, *how)

    at_once.clear()
    monkeypatch.setattr(PackedForward, "__call__", prefilling)
    assert engine.generate(PROMPTS, max_new_tokens=5) == want and max(at_once) == 3
    at_once.clear()
    monkeypatch.setattr(PackedForward, "__call__", decoding)
    assert engine.generate(PROMPTS, max_new_tokens=5) == want and max(at_once) == 4 and at_once[-1] <= 2
    monkeypatch.setattr(PackedForward, "__call__", Mock(side_effect=torch.OutOfMemoryError("no")))
    with pytest.raises(BadInput, match="prompt 0: no; prompt 1: no"):
        engine.generate(PROMPTS[:2], max_new_tokens=5)


def test_a_question_about_several_prompts(monkeypatch):
    engine = precise("qllm")
    how = {"question": "And why is that?", "max_new_tokens": 5}
    want = [engine.generate(prompt, **how) for prompt in PROMPTS]
    assert engine.generate(PROMPTS, **how) == want
    monkeypatch.setattr(Sequence, "set_question", lambda *_: None)
    assert engine.generate(PROMPTS, **how) != want  # it matters


@pytest.mark.parametrize("spec", ["snapkv", "h2o"])
def test_the_engine_names_the_prompts_it_refuses(spec):
    engine = kvkeep.Engine(tiny_chat.model(), WORDS, spec, 64)
    engine.read = None  # nothing is read before
    with pytest.raises(BadInput, match="prompt 1: the prompt has 15.. tokens and the answer may take 3"):
        engine.generate(["a" * 100, "b" * 1500], max_new_tokens=3)


@pytest.mark.parametrize("storage", [None, "int8", "int4"])
def test_a_batch_is_as_large_as_memory_allows(storage):
    how = kvkeep.Engine(tiny_chat.model(), WORDS, "snapkv", 64, storage=storage)
    prompts = ["".join(chr(97 + i * (seed + 2) % 23) for i in range(150)) for seed in range(5)]
    want, sizes, launch = how.generate(prompts, max_new_tokens=8), [], pooled_batch.PooledBatch.launch
    one = memory.row_bytes(how.model, 64 + 8, storage)
    prompt = memory.row_bytes(how.model, how.length(prompts[0]) * 65 // 64)  # in prefill
    for room, rows in ((1.5, 2), (9.0, 5)):
        engine = kvkeep.Engine(how.model, WORDS, "snapkv", 64, storage=storage, memory=prompt + int(room * one))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pooled_batch.PooledBatch, "launch", lambda s: sizes.append(len(s.requests)) or launch(s))
            assert engine.generate(prompts, max_new_tokens=8) == want
        assert max(sizes) == rows
        sizes.clear()
    with pytest.raises(BadInput, match="keys and values of this prompt take .* in prefill, and .* are left; use a sh"):
        kvkeep.Engine(how.model, WORDS, "snapkv", 64, storage=storage, memory=one // 2).generate(prompts)
    with pytest.raises(BadInput, match="this sequence take .* 300 new tokens come to that, and memory= is"):
        kvkeep.Engine(how.model, WORDS, "snapkv", 64, storage=storage, memory=prompt).generate(
            prompts, max_new_tokens=300
        )


def test_the_pool_lives_as_long_as_its_engine():
    engine = kvkeep.Engine(tiny_chat.model(), WORDS, "snapkv", 64)
    engine.generate(PROMPTS, max_new_tokens=4)
    batch = engine._driver.scheduler.held.batches["append: None"]
    pool, runners = weakref.ref(batch.pool), dict(batch.runner.graphs)
    for _ in range(3):
        engine.generate(PROMPTS[0], max_new_tokens=4)
        engine.generate(PROMPTS, max_new_tokens=4)
    assert batch.pool is pool() and runners.items() <= batch.runner.graphs.items()
    del batch, runners
    engine.close()
    assert pool() is None
    with pytest.raises(CacheMisuse, match="closed"):
        engine.generate("more")


@pytest.mark.slow
def test_memory_is_flat_over_many_requests():
    """Every request, cancelled or not, gives back all it took."""
    engine, live = kvkeep.Engine(tiny_chat.model(), WORDS, "snapkv", 64, max_rows=4), []
    made = SequenceConfig.new_sequence
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceConfig, "new_sequence", lambda self: live.append(weakref.ref(s := made(self))) or s)
        for number in range(120):
            handles = [engine.submit(PROMPTS[n][: 20 + number % 90], max_new_tokens=3) for n in range(4)]
            handles[number % 4].cancel()
            for handle in handles:
                handle.result()
    assert len(live) > 340 and sum(ref() is not None for ref in live) <= 4
    pool = engine._driver.scheduler.held.batches["append: None"].pool
    wait_until(lambda: all(free.largest == pool.tokens for free in pool.free.values()))  # every slot is free again
    four_rows = 4 * pool.slots_of(64 + 3)
    assert pool.tokens <= 2 * four_rows  # how far it grew depends on which requests were there at once


def test_a_stream_goes_on_while_a_long_prompt_is_prefilled(monkeypatch):
    """Every step decodes a token of the running answer beside a chunk."""
    monkeypatch.setitem(pace.STEP_TOKENS, "cpu", 16)
    engine = precise("snapkv")
    want = engine.generate(PROMPTS[0], max_new_tokens=60), engine.generate(TEXT, max_new_tokens=3)
    chunks, running = [], engine.stream(PROMPTS[0], max_new_tokens=60)
    text = next(running)
    late = engine.submit(TEXT, max_new_tokens=3, progress=lambda p: chunks.append((p.done, len(engine.answer.ids))))
    assert text + "".join(running) == want[0] and late.result() == want[1]
    assert len(chunks) > 10 and len({tokens for _, tokens in chunks}) == len(chunks)


@pytest.mark.filterwarnings("ignore::kvkeep.errors.QueryAwareWarning")
def test_a_stream_goes_on_while_a_text_is_read(monkeypatch):
    monkeypatch.setitem(pace.STEP_TOKENS, "cpu", 16)
    engine, said = precise("snapkv", history=None), []
    want = engine.generate(PROMPTS[0], max_new_tokens=60), engine.read(TEXT).ask("Why?", max_new_tokens=3)
    with engine._driver.lock:  # only this thread steps: the answer does not end before the text is read
        handle = engine.submit(PROMPTS[0], max_new_tokens=60)
        texts = iter(handle)
        next(texts)
        context = engine.read(TEXT, progress=lambda _: said.append(len(handle.request.answer.ids)))
    assert len(said) > 10 and len(set(said)) > 10  # tokens came meanwhile
    assert context.ask("Why?", max_new_tokens=3) == want[1]


def test_answers_of_asyncio_tasks():
    engine = precise("snapkv")
    want = engine.generate(PROMPTS, max_new_tokens=6)

    async def ask(prompt):
        return "".join([text async for text in engine.submit(prompt, max_new_tokens=6)])

    async def main():
        return await asyncio.gather(*map(ask, PROMPTS))

    assert asyncio.run(main()) == want


def test_submitted_requests_need_nobody_who_waits():
    engine = precise("h2o")
    want, began = engine.generate(PROMPTS[0], max_new_tokens=4), time.monotonic()
    handle = engine.submit(PROMPTS[0], max_new_tokens=4)
    while not handle.done and time.monotonic() < began + 60:
        time.sleep(0.01)
    assert handle.text == want and handle.result() == want == handle.result()
    while engine._driver.thread is not None and time.monotonic() < began + 60:
        time.sleep(0.01)
    assert engine._driver.thread is None  # it ends with the work
    assert threading.active_count() < 20


@pytest.mark.slow
def test_python_ends_while_an_answer_is_decoded():
    """Also while somebody has read some of it: nothing is said."""
    code = (
        "import kvkeep, tiny_chat; engine = kvkeep.Engine(tiny_chat.model(), tiny_chat.tokenizer(), 'snapkv', 64);"
        "texts = iter(engine.submit('a' * 100, max_new_tokens=800)); next(texts); print('over')"
    )
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=where, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_a_callback_may_not_step_the_engine_that_calls_it():
    engine = precise("snapkv")
    with pytest.raises(CacheMisuse, match="callback cannot use the engine"):
        engine.generate(PROMPTS[0], max_new_tokens=2, progress=lambda _: engine.generate("and this?"))
    assert isinstance(engine.generate(PROMPTS[0], max_new_tokens=2), str)


@pytest.mark.parametrize("wrong", [{"max_rows": 0}, {"max_tokens": 1.5}, {"memory": -3}])
def test_sizes_that_cannot_be(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(BadParameter, match=f"{name}={value}: use a whole number"):
        kvkeep.Engine(tiny_chat.model(), WORDS, "snapkv", 64, **wrong)


@pytest.mark.parametrize("spec", ["snapkv", "h2o"])
def test_a_warm_engine_answers_the_same(spec):
    cold, warm, said = precise(spec), precise(spec), []
    warm.warmup(rows=3, progress=said.append)
    assert said and warm.generate(PROMPTS, max_new_tokens=4) == cold.generate(PROMPTS, max_new_tokens=4)
    with warm:
        pass
    with pytest.raises(CacheMisuse):
        warm.submit("a")


def test_a_thread_that_starts_again_is_stopped_once_at_the_end(monkeypatch):
    """Old: one more callback for every idle period of a server."""
    registered, driver = [], kvkeep.Engine(*tiny_chat.sharp(), "snapkv", 40)._driver
    monkeypatch.setattr("atexit.register", lambda *given: registered.append(given))
    for _ in range(3):
        driver.start()
        driver.thread.join()
    assert len(registered) == 1
