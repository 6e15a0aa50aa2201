"""Many prompts at once say what each says alone."""

import pytest
import tiny_chat
import torch
from conftest import make_llama

import kvkeep
from kvkeep.engine.detokenizer import IncrementalDetokenizer
from kvkeep.engine.row_pool import RowPool
from kvkeep.engine.scheduler import Request, Scheduler
from kvkeep.errors import BadInput, BadParameter

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


@pytest.mark.parametrize("spec", ["snapkv", "h2o"])  # from one pool, and side by side
def test_of_one_token_there_is_one_answer(spec):
    """top_k=1 is greedy however hot, for a prompt alone and among others."""
    one, texts = kvkeep.Engine(*tiny_chat.sharp(), spec, 64), ["one and two " * 9, "three, four " * 8]
    cold = [one.generate(text, max_new_tokens=8) for text in texts]
    hot = {"temperature": 5.0, "top_k": 1, "max_new_tokens": 8}
    assert one.generate(texts, **hot) == [one.generate(text, **hot) for text in texts] == cold
    assert one.generate(texts, **{**hot, "top_k": 0}) != cold
