"""Many prompts at once say what each says alone."""

import math
import weakref
from unittest.mock import Mock

import pytest
import tiny_chat
import torch
from conftest import make_llama

import kvkeep
from kvkeep.engine import batch_generate, independent_batch, row_pool
from kvkeep.engine.batch_generate import can_pool
from kvkeep.engine.detokenizer import IncrementalDetokenizer
from kvkeep.engine.independent_batch import IndependentBatch
from kvkeep.engine.row_pool import RowPool
from kvkeep.engine.sampling import Sampler, sample
from kvkeep.engine.scheduler import Request, Scheduler
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import BadInput, BadParameter
from kvkeep.storage.free_list import FreeList

WORDS = tiny_chat.tokenizer()


def reader(model, spec, budget):
    def read(ids):
        if len(ids) > 300:
            raise BadInput("too long")
        cache = kvkeep.Cache(model, spec, budget, schedule="prompt")
        with torch.inference_mode():
            return cache, model(ids[None], past_key_values=cache, logits_to_keep=1).logits[0, -1]

    return read


def request(seed, length, new=8, **how):
    ids = torch.randint(5, 120, (length,), generator=torch.Generator().manual_seed(seed))
    return Request(ids, IncrementalDetokenizer(WORDS), new, **how)


def alone(model, spec, budget, one):
    cache, logits = reader(model, spec, budget)(one.ids)
    written = []
    for _ in range(one.max_new_tokens):
        written.append(int(logits.argmax()))
        logits = model(torch.tensor([written[-1:]]), past_key_values=cache).logits[0, -1]
    return written


def batch(model, spec="snapkv+adakv", budget=40, rows=3, tokens=4000, ends=(), longest=400):
    return Scheduler(model, reader(model, spec, budget), set(ends), RowPool(model, rows, tokens, longest))


@pytest.mark.core
@pytest.mark.parametrize("spec", ["full", "kvkeep", "snapkv", "snapkv+adakv", "h2o", "intelllm", "pyramidkv", "cake"])
def test_together_is_alone_whoever_comes_and_goes(spec):
    model = make_llama()
    work = batch(model, spec)
    requests = [work.submit(request(seed, 60 + 37 * seed, 5 + 3 * seed)) for seed in range(5)]
    done = list(work.run())
    assert sorted(map(id, done)) == sorted(map(id, requests)) and not work.busy
    for one in requests:
        assert one.detokenizer.ids == alone(model, spec, 40, one) and "".join(one.deltas) == one.text
    assert all(free.spans == [(0, 4000)] for free in work.pool.free.values())
    assert not any(int(place.lengths.sum() + place.active.sum()) for place in work.pool.slot_tables.values())


def test_who_does_not_fit_waits_and_who_never_will_is_refused_with_numbers():
    model = make_llama()
    work = batch(model, "snapkv", 40, rows=4, tokens=4 * 50 + 10)  # room for one at a time
    small = [work.submit(request(seed, 70)) for seed in range(3)]
    large, strange = work.submit(request(9, 70, new=40)), work.submit(request(3, 400))
    prefill, prefills = work.prefill, []
    work.prefill = lambda ids: prefills.append(ids) or prefill(ids)
    done = list(work.run())
    assert len(prefills) == 5  # each request once
    want = [alone(model, "snapkv", 40, one) for one in small]
    assert len(done) == 5 and [one.detokenizer.ids for one in small] == want
    assert large.error == (
        "prompt and answer need 320 slots of a layer and up to 80 of a key head; the pool has 210 and 400."
    )
    assert strange.error == "too long" and not strange.detokenizer.ids
    with pytest.raises(BadParameter, match="max_new_tokens=0"):
        work.submit(request(0, 5, new=0))


def test_memory_that_runs_out_while_reading_costs_one_request(monkeypatch):
    model = make_llama()
    work = batch(model)
    prefill = work.prefill

    def sometimes(ids):
        if len(ids) == 99:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB\nmore")
        return prefill(ids)

    work.prefill = sometimes
    good, bad, other = (work.submit(request(0, length)) for length in (70, 99, 80))
    assert len(list(work.run())) == 3
    assert bad.error.startswith("CUDA out of memory. Tried to allocate 7 GiB") and "more" not in bad.error
    assert [len(one.detokenizer.ids) for one in (good, bad, other)] == [8, 0, 8]


def test_an_end_ends_a_row_and_only_it():
    model = make_llama()
    free = batch(model)
    one = free.submit(request(1, 80))
    list(free.run())
    stop = one.detokenizer.ids[3]
    work = batch(model, ends=[stop])
    again, other = work.submit(request(1, 80)), work.submit(request(2, 90))
    list(work.run())
    assert again.detokenizer.ids == one.detokenizer.ids[: one.detokenizer.ids.index(stop)]
    assert stop not in other.detokenizer.ids


def test_drawing():
    torch.manual_seed(0)
    logits = torch.randn(4, 50) * 3
    source = torch.Generator().manual_seed(1)
    temperature, top_p = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([1.0, 1e-6, 0.5, 1.0])
    many = torch.stack([sample(logits, temperature, top_p, source) for _ in range(4000)])
    assert many[:, 0].eq(logits[0].argmax()).all() and many[:, 1].eq(logits[1].argmax()).all()
    chances = logits[3].div(2).softmax(-1)
    seen = torch.bincount(many[:, 3], minlength=50) / 4000
    assert (seen - chances).abs().max() < 0.03
    likely, order = logits[2].softmax(-1).sort(descending=True)
    most = int((likely.cumsum(0) < 0.5).sum()) + 1
    assert set(many[:, 2].tolist()) == set(order[:most].tolist())


def plain_chances(logits, temperature, top_p, top_k):
    """Sampling told token by token: the top_k likeliest, of these the likeliest until top_p is made up."""
    each = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(each)), key=lambda token: (-each[token], token))[: top_k or len(each)]
    whole, kept, total = sum(each[token] for token in order), [], 0.0
    for token in order:
        if total >= top_p:
            break
        kept.append(token)
        total += each[token] / whole
    left = sum(each[token] for token in kept)
    return {token: each[token] / left for token in kept}


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 3), (1.0, 1.0, 1), (0.7, 0.8, 5), (2.0, 0.3, 4), (1.0, 1.0, 0), (1.0, 0.6, 500), (1.0, 1.0, 20)],
)
def test_one_and_many_sample_as_a_plain_loop_does(temperature, top_p, top_k):
    torch.manual_seed(0)
    logits, many = torch.randn(20).mul(2).round(decimals=1), 20_000  # some are equal
    want = plain_chances(logits.tolist(), temperature, top_p, top_k)
    source, ones = torch.Generator().manual_seed(1), torch.ones(many)
    drawn = sample(
        logits.expand(many, -1),
        temperature * ones,
        top_p * ones,
        source,
        torch.full((many,), top_k),
    )
    sampler = Sampler(temperature, top_p, 2, top_k)
    for found, count in ((drawn.tolist(), many), ([sampler(logits) for _ in range(4000)], 4000)):
        assert set(found) <= set(want)
        for token, chance in want.items():
            assert abs(found.count(token) / count - chance) < 5 * (chance / count) ** 0.5 + 1e-3


def test_rows_keep_their_own_top_k():
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    temperature, top_k = torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([5, 1, 2, 0])
    source = torch.Generator().manual_seed(1)
    many = torch.stack([sample(logits, temperature, torch.ones(4), source, top_k) for _ in range(3000)])
    assert [len(set(column.tolist())) for column in many.T][:3] == [1, 1, 2]
    assert many[:, 1].eq(logits[1].argmax()).all() and len(set(many[:, 3].tolist())) > 40


@pytest.mark.parametrize("spec", ["snapkv", "h2o"])  # from one pool, and side by side
def test_of_one_token_there_is_one_answer(spec):
    """top_k=1 is greedy however hot, for a prompt alone and among others."""
    one, texts = kvkeep.Engine(*tiny_chat.sharp(), spec, 64), ["one and two " * 9, "three, four " * 8]
    cold = [one.generate(text, max_new_tokens=8) for text in texts]
    hot = {"temperature": 5.0, "top_k": 1, "max_new_tokens": 8}
    assert one.generate(texts, **hot) == [one.generate(text, **hot) for text in texts] == cold
    assert one.generate(texts, **{**hot, "top_k": 0}) != cold


def test_free_list():
    free = FreeList(10)
    a, b, c = free.allocate(3), free.allocate(3), free.allocate(4)
    assert (a, b, c, free.largest) == (0, 3, 6, 0)
    with pytest.raises(MemoryError, match="no span of 1"):
        free.allocate(1)
    free.free(a, 3)
    free.free(c, 4)
    assert (free.spans, free.largest) == ([(0, 3), (6, 4)], 4)
    free.free(b, 3)
    assert free.spans == [(0, 10)] and FreeList(0).largest == 0


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
