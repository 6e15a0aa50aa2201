"""The pool of rows stays within the device's memory, and is freed at once."""

import gc
import weakref

import pytest
import tiny_chat
import torch
from conftest import make_llama

import kvkeep
from kvkeep.engine import batch_generate
from kvkeep.engine.detokenizer import IncrementalDetokenizer
from kvkeep.engine.pooled_batch import CAPTURE_AFTER, PooledBatch

TEXT = "".join(chr(97 + i * i % 23) + (". " if i % 29 == 0 else "") for i in range(300))
OTHER = "".join(chr(97 + i * 7 % 19) + ("! " if i % 17 == 0 else "") for i in range(280))


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.sharp()


@pytest.mark.parametrize("spec", ["cake", "snapkv+cake", "snapkv+entropy", "snapkv+cake+adakv", "pyramidkv"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_a_layer_may_get_far_more_than_its_share(spec, storage):
    model = make_llama(vocab_size=258, num_hidden_layers=8, eos_token_id=1)
    for layer in model.model.layers[1:]:
        layer.self_attn.q_proj.weight.data /= 5
    one = kvkeep.Engine(model, tiny_chat.tokenizer(), spec, 40, storage=storage)
    alone = [one.generate(text, max_new_tokens=4) for text in (TEXT, OTHER)]
    if spec == "cake":
        assert max(max(heads[0]) for heads in one.cache.report().tokens) > 2 * 40 + 4
    assert one.generate([TEXT, OTHER, TEXT], max_new_tokens=4) == [*alone, alone[0]]


def test_the_pool_stays_within_the_devices_memory(chat, monkeypatch):
    """Room for a layer that gets everything is made only where there is some."""
    one = kvkeep.Engine(*chat, "cake", 40)
    requests = [
        batch_generate.Request(one.encode(text), IncrementalDetokenizer(one.tokenizer), 4) for text in (TEXT, OTHER)
    ]
    usual = batch_generate.row_bytes(one.model, 2 * 40 + 4)
    monkeypatch.setattr(batch_generate, "free_device_bytes", lambda _: int(usual / batch_generate.MEMORY_FRACTION) + 1)
    pool = batch_generate.make_scheduler(one.sequence, requests, 2).pool
    assert pool.rows == 1 and sum(room.nbytes for room in pool.buffers.values()) <= usual


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_pool_is_freed_when_generate_returns(chat, no_gc, monkeypatch):
    pools = []

    class Watched(batch_generate.RowPool):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            pools.append(weakref.ref(self))

    monkeypatch.setattr(batch_generate, "RowPool", Watched)
    kvkeep.Engine(*chat, "snapkv", 64).generate([TEXT, OTHER], max_new_tokens=4)
    assert len(pools) == 1 and pools[0]() is None


@pytest.mark.parametrize("steps", [0, 1, CAPTURE_AFTER + 1])
def test_rows_decoded_together_are_freed_at_once(chat, no_gc, steps):
    model, words = chat
    cache = kvkeep.Cache(model, "snapkv", 32)
    model(words(TEXT, return_tensors="pt").input_ids, past_key_values=cache)
    rows = PooledBatch(model, [cache, cache], CAPTURE_AFTER + 1)
    for _ in range(steps):
        rows.extend(torch.ones(2, 1, dtype=torch.int64))
    gone = weakref.ref(rows)
    del rows
    assert gone() is None
