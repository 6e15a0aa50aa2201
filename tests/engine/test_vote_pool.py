"""Rows that evict by votes within every step say in one pool what each says alone, and leave its cache."""

import pytest
import tiny_chat
import torch
from conftest import make_llama
from test_step_pool import BUDGET, Words, alone, ids, pools

import kvkeep
from kvkeep.cache.decode import policy, vote_pool
from kvkeep.cache.decode.vote_pool import VotePool
from kvkeep.compress.parse import parse
from kvkeep.engine.pooled_batch import PooledBatch
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import SequenceConfig

SPECS = [
    "snapkv",
    "snapkv:window=6:pool=1+adakv",
    "snapkv:window=9:pooling=max+adakv:alpha=0+sinks",
]


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    monkeypatch.setattr(vote_pool, "ROOM", 5)


@pytest.mark.core
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("spec", SPECS)
def test_together_is_alone_and_caches_come_back(spec, ahead, monkeypatch):
    """ahead: on a GPU, a step more has run when the last token is read. Prompts around the budget; rows come and go."""
    monkeypatch.setattr(PooledBatch, "launch", _with_lag(PooledBatch.launch, ahead))
    model, taken = make_llama(num_hidden_layers=2), []
    monkeypatch.setattr(VotePool, "complete", _counting(VotePool.complete, taken))
    config = SequenceConfig(model, Words(), parse(spec), BUDGET, cache_options={"schedule": "step"})
    sizes = [(20, 60), (90, 21), (150, 7), (BUDGET, 30), (BUDGET + 1, 30), (9, 4)]
    work, requests = Scheduler(model, set(), max_rows=3), []
    for seed, (length, new) in enumerate(sizes):
        requests.append(Request(config, ids(seed, length), Generation(new), keeps_cache=True))
        work.submit(requests[-1])
    while work.held.num_requests:
        work.step()
    (pool,) = pools(work)
    assert isinstance(pool, VotePool) and not pool.used and set(taken) == {0, ahead}
    for one in requests:
        sequence, written = alone(one)
        mine, theirs = one.sequence.cache, sequence.cache
        assert one.answer.ids == written and one.sequence.token_ids == sequence.token_ids
        for layer in range(2):
            assert mine.kept(layer) == theirs.kept(layer)
            got, want = (each.backend.store[layer].dense(0).parts for each in (mine, theirs))
            assert got.keys() == want.keys()
            for name, part in got.items():
                torch.testing.assert_close(part, want[name], atol=2e-5, rtol=1e-4)
        for more in (ids(8, 5), *ids(9, 6).split(1)):  # another turn, then decode steps
            torch.testing.assert_close(one.sequence.extend(more), sequence.extend(more), atol=5e-5, rtol=1e-4)
        assert [mine.kept(layer) for layer in range(2)] == [theirs.kept(layer) for layer in range(2)]


def _with_lag(launch, ahead):
    def changed(batch):
        batch.lag = ahead
        launch(batch)

    return changed


def _counting(complete, taken):
    def changed(pool, row, cache, count):
        written = int(next(iter(pool.rings.values())).written[row])
        taken.append(written - cache.seen - count)
        complete(pool, row, cache, count)

    return changed


@pytest.mark.parametrize("spec", ["snapkv:window=8", "snapkv:window=8+adakv"])
def test_an_engine_answers_as_each_row_alone(spec, monkeypatch):
    prompts = ["".join(chr(97 + i * (seed + 2) % 23) for i in range(40 + 30 * seed)) for seed in range(4)]
    model, words = tiny_chat.model().double(), tiny_chat.tokenizer()

    def said():
        engine = kvkeep.Engine(model, words, spec, 48, schedule="step")
        answers = engine.generate(prompts, rows=3, max_new_tokens=40)
        chat = [{"role": "user", "content": prompts[3]}]
        for more in prompts[:2]:  # the second turn goes on with the cache of the first
            answers.append(engine.chat(chat, max_new_tokens=30))
            chat += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": more}]
        cache, kinds = engine.cache, {type(pool) for pool in pools(engine._driver.scheduler)}
        return answers, [cache.kept(layer) for layer in cache.compressed_layers], cache.report().kept, kinds

    *together, kinds = said()
    assert kinds == {VotePool}
    monkeypatch.setattr(policy, "vote_rule", lambda cache: None)
    assert [*together, set()] == [*said()]


def test_a_row_has_room_for_the_budget_and_what_heads_grow_by(monkeypatch):
    seen, share = [], VotePool._share_room

    def shared(pool, rows):
        share(pool, rows)
        seen.append({size for spans in pool.allocated.values() for _, size in spans})
        for i, places in pool.places.items():
            for row in rows:
                edges = [*places.starts[row].tolist(), sum(pool.allocated[row][pool.compressed_layers.index(i)])]
                assert all(
                    b - a >= n + 5 for a, b, n in zip(edges, edges[1:], places.lengths[row].tolist(), strict=False)
                )

    monkeypatch.setattr(VotePool, "_share_room", shared)
    engine = kvkeep.Engine(tiny_chat.model(), tiny_chat.tokenizer(), "snapkv:window=8+adakv", 48, schedule="step")
    engine.generate(["ab" * 60, "bc" * 50], max_new_tokens=30)
    assert seen == [{2 * (48 + 1 + 5)}] * 5


def test_what_a_vote_pool_takes_and_what_it_refuses():
    tiny = make_llama(num_hidden_layers=2)

    def taken(spec, budget=BUDGET, **options):
        sequence = SequenceConfig(
            tiny, Words(), parse(spec), budget, cache_options={"schedule": 1} | options
        ).new_sequence()
        sequence.prefill(ids(1, 60))
        return policy.vote_rule(sequence.cache)

    assert taken("snapkv").sure == BUDGET
    assert taken("snapkv+adakv").sure == 24  # the window's 20, and alpha of the rest
    for spec, budget, options in [
        ("snapkv", 0.5, {}), ("snapkv+pyramid", BUDGET, {}), ("snapkv+shared", BUDGET, {}), ("kvkeep", BUDGET, {}),
        ("snapkv", BUDGET, {"schedule": 4}), ("snapkv", BUDGET, {"schedule": "prompt"}), ("chunkkv", BUDGET, {}),
        ("h2o", BUDGET, {}), ("snapkv+threshold", BUDGET, {}),
        ("pyramidkv", BUDGET, {}), ("rkv", BUDGET, {}),
    ]:  # fmt: skip
        assert taken(spec, budget, **options) is None, (spec, budget, options)
