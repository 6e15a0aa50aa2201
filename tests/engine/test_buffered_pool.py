"""Rows that evict every so many steps, decoded together: each as it is alone."""

import pytest
import tiny_chat
from conftest import EVICTING

import kvkeep
from kvkeep.cache import eviction, evictor
from kvkeep.cache.decode import policy
from kvkeep.cache.decode.buffered_pool import BufferedPool
from kvkeep.engine.pooled_batch import PooledBatch

PROMPTS = ["".join(chr(97 + i * (seed + 2) % 23) for i in range(40 + 30 * seed)) for seed in range(4)]
OTHERS = ["snapkv+adakv", "snapkv+pyramid", "snapkv+shared"]


def pools(engine):
    return [batch.pool for batch in engine._driver.scheduler.held.batches.values() if hasattr(batch, "pool")]


def answers(spec, buffered, monkeypatch, budget=48, every=6):
    model, words = tiny_chat.model().double(), tiny_chat.tokenizer()
    if not buffered:
        monkeypatch.setattr(policy, "_evicts_between_steps", lambda cache: False)
    engine = kvkeep.Engine(model, words, spec, budget, schedule=every)
    said = engine.generate(PROMPTS, rows=3, max_new_tokens=40)
    assert buffered == any(isinstance(pool, BufferedPool) for pool in pools(engine))
    chat = [{"role": "user", "content": PROMPTS[3]}]
    for more in PROMPTS[:2]:  # the second turn goes on with the cache of the first
        said.append(engine.chat(chat, max_new_tokens=30))
        chat += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": more}]
    cache = engine.cache
    return said, [cache.kept(layer) for layer in cache.compressed_layers], cache.seen


@pytest.mark.parametrize("spec", [*EVICTING, *OTHERS])
def test_rows_with_a_buffer_decode_as_each_does_alone(spec, monkeypatch):
    cache = kvkeep.Cache(tiny_chat.model(), spec, 48, schedule=6)
    if not policy._evicts_between_steps(cache):
        pytest.skip("it changes something at every step, or moves keys")
    assert answers(spec, True, monkeypatch) == answers(spec, False, monkeypatch)


@pytest.mark.parametrize(("spec", "selections"), [("rkv", 1), ("snapkv+adakv", 1), ("kvkeep", 1), ("pyramidkv", 2)])
def test_where_layers_decide_by_themselves_all_are_selected_from_at_once(spec, selections, monkeypatch):
    calls = []
    for module in (evictor, eviction):
        each = module.decide
        monkeypatch.setattr(module, "decide", lambda *given, each=each: calls.append(given[0]) or each(*given))
    engine = kvkeep.Engine(tiny_chat.model(), tiny_chat.tokenizer(), spec, 48, schedule=6)
    engine.generate(PROMPTS[3], max_new_tokens=2)
    calls.clear()
    engine.generate(PROMPTS[3], max_new_tokens=9)
    decoded = [seen for seen in calls if seen.is_step]
    assert len(decoded) == selections and {seen.seq_len for seen in decoded} == {engine.length(PROMPTS[3]) + 6}


def test_a_budget_may_be_a_fraction(monkeypatch):
    assert answers("snapkv", True, monkeypatch, 0.5) == answers("snapkv", False, monkeypatch, 0.5)


@pytest.mark.parametrize("cut", [3, 20])  # before and after an eviction
def test_a_chat_that_is_cut_short_begins_anew(cut, monkeypatch):
    model, words, chat = tiny_chat.model(), tiny_chat.tokenizer(), [{"role": "user", "content": PROMPTS[3]}]
    engine = kvkeep.Engine(model, words, "rkv", 48, schedule=6)
    steps, launch = iter(range(cut)), PooledBatch.launch

    def few(batch):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        launch(batch)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(PooledBatch, "launch", few)
        engine.chat(chat, max_new_tokens=30)
    expected = kvkeep.Engine(model, words, "rkv", 48, schedule=6).chat(chat, max_new_tokens=30)
    assert engine.chat(chat, max_new_tokens=30) == expected


def test_keys_and_values_are_in_the_pool_alone(monkeypatch):
    """And a row has room for the budget and the buffer, however long its answer is."""
    begin, heads, seen = BufferedPool.begin_step, 2 * (48 + 6), []  # slots of each layer

    def begin_step(pool):
        grown = begin(pool)
        seen.append([row.cache.nbytes for row in pool.used.values()])
        assert all(size == heads for spans in pool.allocated.values() for _, size in spans)
        return grown

    monkeypatch.setattr(BufferedPool, "begin_step", begin_step)
    kvkeep.Engine(tiny_chat.model(), tiny_chat.tokenizer(), "rkv", 48, schedule=6).generate(PROMPTS, max_new_tokens=40)
    assert seen == [[0] * 4] * 39
