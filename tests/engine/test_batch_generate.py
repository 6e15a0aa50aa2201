"""Many prompts through the engine: what each says alone, within host and device memory."""

import weakref
from unittest.mock import Mock

import pytest
import tiny_chat
import torch

import kvkeep
from kvkeep.engine import batch_generate, independent_batch, row_pool
from kvkeep.engine.batch_generate import can_pool
from kvkeep.engine.independent_batch import IndependentBatch
from kvkeep.engine.row_pool import RowPool
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import BadInput

WORDS = tiny_chat.tokenizer()


@pytest.mark.parametrize("spec", ["kvkeep", "snapkv", "full", "pyramidkv", "h2o", "infllm", "emllm", "sentencekv"])
def test_the_engine_answers_many_as_it_answers_one(spec):
    model = tiny_chat.model().double()  # a batch rounds otherwise than a row: too little to change what is fetched
    prompts = ["".join(chr(97 + (i * i + n) % 23) for i in range(100 + 60 * n)) for n in range(5)]
    one, many = (kvkeep.Engine(model, WORDS, spec, 64) for _ in range(2))
    want = [one.generate(prompt, max_new_tokens=7) for prompt in prompts]
    assert many.generate(prompts, max_new_tokens=7, rows=2) == want
    assert many.generate([]) == [] and can_pool(many.sequence) == (spec not in ("h2o", "infllm", "emllm", "sentencekv"))
    drawn = {"max_new_tokens": 7, "temperature": 1.5, "seed": 4}
    if not can_pool(many.sequence):  # a row draws as it would alone
        assert many.generate(prompts, rows=3, **drawn) == [one.generate(prompt, **drawn) for prompt in prompts]


PROMPTS = ["".join(chr(97 + (i * i + n) % 23) for i in range(150)) for n in range(4)]


@pytest.fixture
def at_once(monkeypatch):
    """How many rows each pass had."""
    sizes, extend = [], IndependentBatch.extend
    monkeypatch.setattr(IndependentBatch, "extend", lambda self, ids: sizes.append(len(ids)) or extend(self, ids))
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
    engine = precise("infllm")
    want = [engine.generate(prompt, max_new_tokens=3) for prompt in PROMPTS]
    one = row_pool.row_bytes(engine.model, 153 + 3) / 0.8  # three words more than the prompt's, and the answer
    alive = living(monkeypatch)
    monkeypatch.setattr(independent_batch, "free_host_bytes", lambda: (2 - alive()) * one + 1)
    assert engine.generate(PROMPTS, max_new_tokens=3) == want and set(at_once) == {2}
    monkeypatch.setattr(independent_batch, "free_host_bytes", lambda: 0)
    at_once.clear()
    assert engine.generate(PROMPTS, max_new_tokens=3) == want and set(at_once) == {1}
    monkeypatch.setattr(independent_batch, "free_host_bytes", lambda: None)
    at_once.clear()
    assert engine.generate(PROMPTS, max_new_tokens=3) == want and set(at_once) == {4}
    assert row_pool.free_host_bytes() is None or 2**20 < row_pool.free_host_bytes() < 2**50


def test_prompts_share_what_the_host_may_hold(at_once):
    want = precise("infllm").generate(PROMPTS, max_new_tokens=3)
    alone = precise("infllm")
    alone.generate(PROMPTS[0], max_new_tokens=3)
    limit = int(2.5 * alone.cache.host_budget.used_bytes)
    at_once.clear()
    engine = precise("infllm", host_limit=limit)
    assert engine.generate(PROMPTS, max_new_tokens=3) == want and set(at_once) == {2}
    with pytest.raises(BadInput, match="prompt 0: offloaded tokens would take .* prompt 3: "):
        precise("infllm", host_limit=1000).generate(PROMPTS, max_new_tokens=3)


@pytest.mark.parametrize("spec", ["h2o", "infllm"])
def test_who_does_not_fit_on_the_device_waits(spec, at_once, monkeypatch):
    engine, read, extend = precise(spec), Sequence.prefill, IndependentBatch.extend
    want = engine.generate(PROMPTS, max_new_tokens=5)
    alive = living(monkeypatch)

    def reading(self, ids, *how):
        if alive() > 3:
            raise torch.OutOfMemoryError("no room")
        return read(self, ids, *how)

    def feeding(self, ids):
        if len(ids) > 2 and len(self.sequences[0].token_ids) > 154:
            raise torch.OutOfMemoryError("no room for a pass")
        return extend(self, ids)

    at_once.clear()
    monkeypatch.setattr(Sequence, "prefill", reading)
    assert engine.generate(PROMPTS, max_new_tokens=5) == want and max(at_once) == 3
    at_once.clear()
    monkeypatch.setattr(Sequence, "prefill", read)
    monkeypatch.setattr(IndependentBatch, "extend", feeding)
    assert engine.generate(PROMPTS, max_new_tokens=5) == want and at_once[0] == 4 and at_once[-1] <= 2
    full = Mock(side_effect=torch.OutOfMemoryError("no"))
    monkeypatch.setattr(IndependentBatch, "extend", full)
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
def test_a_batch_is_as_large_as_the_device_allows(storage, monkeypatch):
    engine = kvkeep.Engine(tiny_chat.model(), WORDS, "snapkv", 64, storage=storage)
    prompts = ["".join(chr(97 + i * (seed + 2) % 23) for i in range(150)) for seed in range(5)]
    want = engine.generate(prompts, max_new_tokens=8)
    tokens = 64 + (8 if storage is None else 32)
    one = row_pool.row_bytes(engine.model, tokens, storage)
    assert one == sum(room.nbytes for room in RowPool(engine.model, 1, 2 * tokens, 200, storage).buffers.values())
    sizes = []
    monkeypatch.setattr(batch_generate, "RowPool", lambda *how: sizes.append(how[1]) or RowPool(*how))
    for room, rows in ((2.5, 2), (9.0, 5)):
        monkeypatch.setattr(batch_generate, "free_device_bytes", lambda device, room=room: int(room * one / 0.8))
        assert engine.generate(prompts, max_new_tokens=8) == want and sizes.pop() == rows
    monkeypatch.setattr(batch_generate, "free_device_bytes", lambda device: one)
    with pytest.raises(BadInput, match="one sequence take .* of the device's memory can be used"):
        engine.generate(prompts, max_new_tokens=8)
