"""Rows that evict at every step say in one pool what each says alone, whoever comes and goes, and leave its cache."""

import random

import pytest
import torch
from conftest import make_llama

import kvkeep
from kvkeep.cache.decode import policy
from kvkeep.cache.decode.step_pool import StepPool
from kvkeep.compress.parse import parse
from kvkeep.compress.presets import METHODS, MODIFIERS
from kvkeep.compress.step_rule import StepRule
from kvkeep.engine.batch import DecodeBatch
from kvkeep.engine.pooled_batch import PooledBatch
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.errors import BadInput, BadParameter
from kvkeep.types import Budget

BUDGET = 40


class Words:
    """The decoded ids are noise."""

    chat_template = eos_token_id = None

    def __call__(self, text, **_):
        raise AssertionError("prompts are ids")

    def decode(self, ids, **_):
        return ""


def evicts_in_steps(spec):
    try:
        method = parse(spec)
    except BadParameter:
        return False
    return method.schedule.every == 1 and StepRule(method, Budget(BUDGET), 4096).scorer is not None


SPECS = [
    spec for name in METHODS for spec in (name, *(f"{name}+{each}" for each in MODIFIERS)) if evicts_in_steps(spec)
]
SPECS += ["ahakv:decode_prior=True", "ahakv:step_gain=False", "ahakv:gain=multiply"]


def ids(seed, length):
    return torch.randint(5, 100, (length,), generator=torch.Generator().manual_seed(seed))


def new_request(model, spec, text, length, new=30, budget=BUDGET, storage=None, keeps_cache=False, **how):
    config = SequenceConfig(model, Words(), parse(spec), budget, cache_options={"storage": storage})
    return Request(config, ids(text, length), Generation(new, **how), keeps_cache=keeps_cache)


def alone(request):
    """A sequence that has seen what the request decoded, and the tokens it would have decoded."""
    sequence, written = request.config.new_sequence(), []
    logits = sequence.prefill(request.ids)
    for _ in range(len(request.answer.ids)):
        written.append(int(logits.argmax()))
        if len(written) < len(request.answer.ids):
            logits = sequence.extend(torch.tensor(written[-1:]))[-1]
    return sequence, written


def pools(work):
    return [batch.pool for batch in work.held.batches.values() if isinstance(batch, PooledBatch)]


def test_the_registry_has_methods_that_evict_in_steps():
    assert {"h2o", "tova", "ahakv", "streamingllm", "lm_infinite", "h2o+sinks", "tova+sinks"} <= set(SPECS)


@pytest.mark.core
@pytest.mark.parametrize("spec", SPECS)
def test_together_is_alone_whoever_comes_and_goes(spec):
    """Prompts shorter than the budget and longer, a pool that grows, and rows that are free between others."""
    tiny = make_llama(num_hidden_layers=2)
    draw, work = random.Random(spec), Scheduler(tiny, set(), max_rows=5)
    lengths = [BUDGET - 20, 90, 150, BUDGET, BUDGET + 1, BUDGET - 1, BUDGET - 25]  # the last in rows that were full
    requests = [new_request(tiny, spec, seed, length, draw.randrange(32, 42)) for seed, length in enumerate(lengths)]
    gone = new_request(tiny, spec, 9, 70, 90)
    for request in (requests[0], gone, *requests[1:]):
        work.submit(request)
        for _ in range(draw.randrange(12)):
            work.step()
    gone.cancelled = True
    work.run([])
    while work.held.num_requests:
        work.step()
    assert [request.answer.ids for request in requests] == [alone(request)[1] for request in requests]
    (pool,) = pools(work)
    assert isinstance(pool, StepPool) and not pool.allocated and pool.rows > 1


@pytest.mark.parametrize("spec", ["h2o", "streamingllm"])
def test_a_seed_samples_what_it_samples_alone(tiny, spec, monkeypatch):
    def said():
        requests = [new_request(tiny, spec, n, 20 + 30 * n, temperature=1.0, seed=n, top_p=0.9) for n in range(4)]
        work = Scheduler(tiny, set(), max_rows=3)
        work.run(requests)
        return [request.answer.ids for request in requests], [type(batch) for batch in work.held.batches.values()]

    together, kinds = said()
    monkeypatch.setattr(policy, "evict_one_rule", lambda cache: None)
    assert (together, kinds) == (said()[0], [PooledBatch]) and said()[1] == [DecodeBatch]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("length, new", [(12, 9), (30, 10), (30, 11), (30, 12), (100, 30)])
@pytest.mark.parametrize("spec", ["h2o", "ahakv", "tova", "streamingllm", "lm_infinite"])
def test_a_cache_comes_back_as_if_it_had_decoded(spec, length, new, ahead):
    """ahead: on a GPU, a step more has run when the last token is read. lm_infinite moves keys beyond 64 tokens."""
    model = make_llama(max_position_embeddings=64 if spec == "lm_infinite" else 4096)
    one = new_request(model, spec, 3, length, new, keeps_cache=True)
    work = Scheduler(model, set())
    work.submit(one)
    while not work.held.batch_of:
        work.step()
    (batch,) = work.held.batches.values()
    batch.lag = ahead
    work.run([])
    while work.held.num_requests:
        work.step()
    sequence, written = alone(one)
    mine, theirs = one.sequence.cache, sequence.cache
    assert isinstance(batch.pool, StepPool) and one.answer.ids == written
    assert one.sequence.token_ids == sequence.token_ids and mine.report().kept == theirs.report().kept
    for layer in range(4):
        assert mine.kept(layer) == theirs.kept(layer)
        got, want = (each.backend.store[layer].dense(0).parts for each in (mine, theirs))
        assert got.keys() == want.keys()
        for name, part in got.items():
            torch.testing.assert_close(part, want[name], atol=2e-5, rtol=1e-4)
    for more in (ids(8, 5), *ids(9, 6).split(1)):  # another turn, then decode steps
        torch.testing.assert_close(one.sequence.extend(more), sequence.extend(more), atol=5e-5, rtol=1e-4)
    assert [mine.kept(layer) for layer in range(4)] == [theirs.kept(layer) for layer in range(4)]


@pytest.mark.parametrize("spec", ["h2o", "ahakv", "streamingllm"])
def test_a_row_that_was_full_is_as_good_as_new(tiny, spec):
    """A kernel writes the logits of slots in use alone: the others must not be those of the row before."""
    caches = []
    for length in (90, 20):
        sequence = new_request(tiny, spec, 1, length).config.new_sequence()
        sequence.prefill(ids(1, length))
        caches.append(sequence.cache)
    used, fresh = (StepPool(caches[0]) for _ in range(2))
    for pool in (used, fresh):
        pool.grow(1, pool.slots, 0)
    used.admit(0, caches[0], 60)
    for position in range(90, 95):
        tiny(torch.tensor([[7]]), position_ids=torch.tensor([[position]]), past_key_values=used)
    used.release(0)
    for pool in (used, fresh):
        pool.admit(0, caches[1], 60)
    (mine,), (theirs,) = used.steps.blocks, fresh.steps.blocks
    assert all(torch.equal(part, theirs.rows.parts[name]) for name, part in mine.rows.parts.items())


def test_what_a_step_pool_takes_and_what_it_refuses(tiny):
    def taken(spec, budget=BUDGET, **options):
        sequence = SequenceConfig(tiny, Words(), parse(spec), budget, cache_options=options).new_sequence()
        sequence.prefill(ids(1, 60))
        return policy.evict_one_rule(sequence.cache) is not None

    assert taken("h2o") and taken("h2o", 100) and taken("streamingllm", schedule=1)
    for spec, budget, options in [
        ("h2o", 0.5, {}), ("h2o+adakv", BUDGET, {}), ("h2o+pyramid", BUDGET, {}), ("h2o", BUDGET, {"schedule": 4}),
        ("h2o", BUDGET, {"schedule": "prompt"}), ("snapkv", BUDGET, {"schedule": "step"}), ("infllm", 64, {}),
    ]:  # fmt: skip
        assert not taken(spec, budget, **options), (spec, budget, options)
    with pytest.raises(BadInput, match="one sequence take .* can be used for them"):
        Scheduler(tiny, set(), max_tokens=20).run([one := new_request(tiny, "h2o", 1, 60)])
        raise one.error


def test_methods_and_budgets_have_pools_of_their_own(tiny):
    """Without graphs, they share forward passes while they decode together; a pool that is idle makes room."""
    work = Scheduler(tiny, set())
    for spec, budget in (("h2o", BUDGET), ("h2o", 30), ("tova", 30)):
        one = new_request(tiny, spec, 1, 60, budget=budget)
        work.run([one])
        assert [(pool.steps.rule.method.name, pool.steps.rule.tokens) for pool in pools(work)] == [(spec, budget)]
    together = [new_request(tiny, spec, 2, 60, budget=budget) for spec in ("h2o", "ahakv") for budget in (30, BUDGET)]
    work.run(together)
    assert [request.answer.ids for request in together] == [alone(request)[1] for request in together]
    assert "alone" in work.held.batches and len(pools(work)) == 1


def test_an_engine_uses_it(tiny):
    engine = kvkeep.Engine(tiny, Words(), "h2o", BUDGET, max_rows=2)
    requests = [Request(engine.config, ids(n, 60), Generation(20)) for n in range(3)]
    engine._driver.run(requests, 3)
    (pool,) = pools(engine._driver.scheduler)
    assert isinstance(pool, StepPool) and pool.rows == 2 and pool.nbytes == 2 * 4 * 2 * 4 * (BUDGET + 1) * 8 * 4
