"""Rows decoded from a pool are rows decoded alone, and leave a cache that holds what they decoded."""

from types import SimpleNamespace

import pytest
import torch
from conftest import EVICTING, make_llama
from test_scheduler import alone, run
from test_scheduler import request as new_request

import kvkeep
from kvkeep.cache.decode.policy import Policy
from kvkeep.compress.parse import parse
from kvkeep.engine.pooled_batch import PooledBatch
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.errors import BadInput

SPECS = [*EVICTING, "snapkv+adakv", "snapkv+pyramid", "protokv:votes=softmax+adakv", "h2o+adakv"]


class Words:
    """The decoded ids are noise."""

    chat_template = eos_token_id = None

    def __call__(self, text, **_):
        return SimpleNamespace(input_ids=[len(text)])

    def decode(self, ids, **_):
        return ""


def prefilled(model, spec, budget, length, new=12, storage=None, **how):
    options = {"schedule": "prompt", "storage": storage}
    sequence = SequenceConfig(model, Words(), parse(spec), budget, cache_options=options).new_sequence()
    ids = torch.arange(length) * 7 % 128
    request = Request(sequence.config, ids, Generation(new), sequence, keeps_cache=True, **how)
    request.add(int(sequence.prefill(ids).argmax()))
    return request


def admitted(model, requests, **how):
    batch = PooledBatch(model, requests[0].sequence.cache.storage, **how)
    for request in requests:
        assert batch.has_room(request, ())
        batch.admit(request)
    return batch


def step(batch):
    batch.launch()
    for request, token, _ in batch.collect():
        request.steps += 1
        request.add(token)


@pytest.mark.core
@pytest.mark.parametrize("spec", SPECS)
def test_together_is_alone_and_the_caches_go_on(tiny, spec):
    requests = [prefilled(tiny, spec, budget, 150) for budget in (24, 60, 33)]
    alone = [request.sequence.fork() for request in requests]
    batch = admitted(tiny, requests)
    for _ in range(5):
        inputs = [request.answer.ids[-1] for request in requests]
        step(batch)
        for request, sequence, token in zip(requests, alone, inputs, strict=True):
            assert request.answer.ids[-1] == int(sequence.extend(torch.tensor([token]))[-1].argmax())
    for request, sequence in zip(requests, alone, strict=True):
        batch.release(request)
        mine, other = request.sequence, sequence
        assert mine.token_ids == other.token_ids and mine.cache.seen == other.cache.seen == 155
        assert [mine.cache.kept(i) for i in range(4)] == [other.cache.kept(i) for i in range(4)]
        assert mine.cache.report().kept == other.cache.report().kept
        got, want = (each.extend(torch.tensor([5, 6, 7]), keep=0) for each in (mine, other))
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
        layers = range(spec == "knorm", 4)  # in the first layer, keys of one token have one norm: rounding decides
        assert [mine.cache.kept(i) for i in layers] == [other.cache.kept(i) for i in layers]  # by the new queries


@pytest.mark.parametrize("storage", ["int8", "int4"])
@pytest.mark.parametrize("new", [5, 40, 64])
def test_quantized_groups_come_back_as_they_are(storage, new):
    """bfloat16, where numbers made of codes would not give the same codes again."""
    model = make_llama().bfloat16()
    one = prefilled(model, "snapkv", 70, 200, 80, storage)
    batch = admitted(model, [one])
    for _ in range(new):
        step(batch)
    starts, buffers = batch.pool.allocated[0], batch.pool.buffers
    batch.release(one)
    for (start, size), (i, buffer) in zip(starts, buffers.items(), strict=True):
        layer = one.sequence.cache.backend.store[i].quantized
        groups, tail = divmod(70 + new, 32)
        for head, first in enumerate(layer.firsts):
            theirs = (start + head * size // 4) // 32
            for mine, pooled in zip(layer.kv.tensors, buffer.kv.tensors, strict=True):
                each = len(mine) * 32 // layer.kv.slots  # rows of a group: 32 tokens, or one
                parts = (t[at * each : (at + groups) * each] for t, at in ((mine, first), (pooled, theirs)))
                assert torch.equal(*parts)
            for mine, pooled in zip((layer.tail_keys, layer.tail_values), buffer.tails, strict=True):
                assert mine[0, head, :tail].equal(pooled[0, head, :tail])


def test_rows_that_are_done_leave_and_others_come(tiny):
    first = [prefilled(tiny, "snapkv+adakv", budget, 90) for budget in (70, 80, 85)]
    alone = [request.sequence.fork() for request in first]
    batch = admitted(tiny, first, max_rows=3)
    step(batch)
    batch.release(first[1])
    late = prefilled(tiny, "snapkv+adakv", 40, 60)
    alone_late = late.sequence.fork()
    assert batch.has_room(late, ()) and not batch.inflight
    batch.admit(late)
    assert batch.by_row[1] is late and not batch.has_room(prefilled(tiny, "snapkv", 40, 60), ())
    for _ in range(3):
        step(batch)
    for request, sequence in ((first[0], alone[0]), (first[2], alone[2]), (late, alone_late)):
        logits = [sequence.extend(torch.tensor([token]))[-1] for token in request.answer.ids[:-1]]
        assert request.answer.ids[1:] == [int(each.argmax()) for each in logits]


def test_what_a_pool_takes_and_what_it_refuses(tiny):
    one = prefilled(tiny, "snapkv", 20, 60)
    batch = PooledBatch(tiny, max_tokens=20)
    with pytest.raises(BadInput, match="one sequence take .* can be used for them"):
        batch.has_room(one, ())
    sequences = {spec: kvkeep.Engine(tiny, Words(), spec, 64).sequence for spec in ("snapkv", "h2o", "infllm", "full")}
    assert {spec: Policy.of(each.cache) is Policy.APPEND for spec, each in sequences.items()} == {
        "snapkv": True, "h2o": False, "infllm": False, "full": True,
    }  # fmt: skip


def test_a_pool_whose_rows_are_free_grows_no_slots_for_a_longer_head(tiny):
    """Heads that share a budget differ in length. Slots are added where no free span is long enough."""
    batch = PooledBatch(tiny, max_rows=8)
    kv_heads = batch.kv_heads
    batch.reserve(60 * kv_heads, 60, 8, 8 * 60 * kv_heads)
    assert (batch.pool.rows, batch.pool.tokens, batch.pool.longest) == (8, 8 * 60 * kv_heads, 64)
    batch.reserve(60 * kv_heads, 200, 1, 60 * kv_heads)
    assert (batch.pool.rows, batch.pool.tokens, batch.pool.longest) == (8, 8 * 60 * kv_heads, 256)
    first = prefilled(tiny, "full", None, 450, new=40)
    assert batch.has_room(first, ())
    assert batch.pool.tokens == 8 * 60 * kv_heads + 490 * kv_heads  # beside them, for no span is as long
    batch.admit(first)
    second = prefilled(tiny, "full", None, 100, new=10)
    assert batch.has_room(second, ()) and batch.pool.tokens == (8 * 60 + 490) * kv_heads


def test_the_cache_a_row_was_copied_from_is_not_changed(tiny):
    one = prefilled(tiny, "snapkv:window=8", 20, 50)
    one.keeps_cache, cache = False, one.sequence.cache
    before = cache.backend.store[0].flat.keys.clone()
    batch = admitted(tiny, [one])
    step(batch)
    batch.release(one)
    assert cache.backend.store[0].flat.keys.equal(before) and cache.seen == 50 and one._sequence is None


def test_a_model_of_one_key_head():
    """In each kind of pool two rows are what each is alone."""
    model = make_llama(num_key_value_heads=1, num_hidden_layers=2, vocab_size=258).double()
    work = Scheduler(model, set())
    kinds = [("full", None), ("full", "int8"), ("streamingllm", None), ("infllm", None)]
    requests = [new_request(model, spec, seed, 90, 8, 64, None, storage) for spec, storage in kinds for seed in (1, 2)]
    run(work, requests)
    assert [one.answer.ids for one in requests] == [alone(one) for one in requests]
