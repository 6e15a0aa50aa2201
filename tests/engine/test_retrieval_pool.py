"""Rows decoded from a retrieval pool are rows decoded alone, and leave a cache that goes on as theirs would."""

import gc
import weakref

import pytest
import torch
from conftest import RETRIEVING, make_llama

import kvkeep
from kvkeep.cache.decode import policy
from kvkeep.compress.parse import parse
from kvkeep.engine.request import Request
from kvkeep.engine.retrieval_batch import RetrievalBatch
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import SequenceConfig

POOLED = ["actqkv", "infllm", "qllm", "quest", "tokenselect"]
SPECS = [*POOLED, "actqkv:chunk=4:representatives=2", "infllm:per_head=False", "quest:page=4", "actqkv:density=False"]
SPECS += ["infllm:block=24:local=5"]  # a block is longer than the near window
LONG, SHORT, EDGE = 150, 40, 63  # tokens of a prompt; the budget is 64
STEPS = 50


class Words:
    """One token per character."""

    chat_template = eos_token_id = bos_token = bos_token_id = None

    def __call__(self, text, return_tensors=None, **_):
        ids = [ord(character) % 512 for character in text]
        return type("Encoded", (), {"input_ids": torch.tensor([ids]) if return_tensors else ids})

    def decode(self, ids, **_):
        return "".join(chr(256 + int(i)) for i in ids)

    def convert_ids_to_tokens(self, ids):
        return [str(i) for i in ids]


@pytest.fixture
def model():
    model = make_llama(vocab_size=512, num_hidden_layers=2)
    model.generation_config.eos_token_id = None
    return model


def prompt(length, seed=0):
    """No token comes twice: equal keys would tie, and ties are up to rounding."""
    return torch.randperm(400, generator=torch.Generator().manual_seed(seed))[:length]


def prefilled(model, spec, length, new=STEPS + 5, budget=64, keeps=True):
    sequence = SequenceConfig(model, Words(), parse(spec), budget).new_sequence()
    if sequence.config.method.retrieval and "question" in sequence.config.method.retrieval.index.needs:
        sequence.set_question("wherever is it?", length)
    ids = prompt(length, length)
    request = Request(sequence.config, ids, Generation(new), sequence, keeps_cache=keeps)
    request.add(int(sequence.prefill(ids).argmax()))
    return request


def admitted(requests, max_rows=4):
    batch = RetrievalBatch(requests[0].sequence.cache, max_rows, None, None)
    for request in requests:
        admit(batch, request)
    return batch


def admit(batch, request):
    assert batch.has_room(request, ())
    batch.admit(request)


def step(batch, token):
    """Every row gets the same token. -> the tokens that would follow, by request"""
    batch.runner.tokens[:] = token
    batch.launch()
    decoded = {request: token for request, token, _ in batch.collect()}
    for request in decoded:
        request.steps += 1
        request.answer.ids[-1:] = [token]
        request.answer.ids.append(0)
    return decoded


def follows(sequence, token):
    return int(sequence.extend(torch.tensor([token]))[-1].argmax())


@pytest.mark.core
@pytest.mark.parametrize("spec", SPECS)
def test_together_is_alone_and_the_caches_go_on(model, spec):
    requests = [prefilled(model, spec, length) for length in (LONG, SHORT, EDGE)]
    alone = [request.sequence.fork() for request in requests]
    batch = admitted(requests)
    for token in range(400, 400 + STEPS):
        decoded = step(batch, token)
        assert [decoded[each] for each in requests] == [follows(each, token) for each in alone]
    for request, other in zip(requests, alone, strict=True):
        batch.release(request)
        mine = request.sequence
        assert mine.token_ids == other.token_ids and mine.cache.seen == other.cache.seen
        assert [mine.cache.kept(i) for i in range(2)] == [other.cache.kept(i) for i in range(2)]
        assert mine.cache.report().kept == other.cache.report().kept
        assert mine.cache.report().host_bytes == other.cache.report().host_bytes > 0
        more = torch.tensor([5, 6, 7, 8] + list(range(490, 512)))
        got, want = (each.extend(more, keep=0) for each in (mine, other))
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
        assert [mine.cache.kept(i) for i in range(2)] == [other.cache.kept(i) for i in range(2)]


@pytest.mark.parametrize("spec", POOLED)
def test_rows_that_are_done_leave_and_larger_ones_come(model, spec):
    """The pool grows, and what is under way goes on."""
    first = [prefilled(model, spec, length, 50) for length in (70, SHORT)]
    alone = {request: request.sequence.fork() for request in first}
    batch = admitted(first, 3)
    for token in range(400, 420):
        decoded = step(batch, token)
        assert all(decoded[each] == follows(sequence, token) for each, sequence in alone.items())
    rows = batch.pool.rows
    batch.release(first[0])
    del alone[first[0]]
    for length in (300, 90):
        late = prefilled(model, spec, length, 60)
        alone[late] = late.sequence.fork()
        admit(batch, late)
    assert batch.pool.rows > rows and not batch.has_room(prefilled(model, spec, SHORT), ())
    for token in range(420, 450):
        decoded = step(batch, token)
        assert all(decoded[each] == follows(sequence, token) for each, sequence in alone.items())


@pytest.mark.parametrize(
    "spec, how",
    [
        ("actqkv", {}), ("infllm", {}), ("quest", {"temperature": 1.5, "seed": 3}),
        ("infllm", {"temperature": 0.7, "top_p": 0.9}),
    ],
    ids=str,
)  # fmt: skip
def test_answers_through_an_engine_are_those_of_rows_alone(model, spec, how, monkeypatch):
    texts = ["".join(map(chr, prompt(length, length).tolist())) for length in (LONG, SHORT, 90, 7)]
    answers, kinds = [], []
    for pools in (True, False):
        with monkeypatch.context() as here:
            if not pools:
                here.setattr(policy, "retrieval_plan", lambda cache: None)
            engine = kvkeep.Engine(model, Words(), spec, 64)
            each = [engine.submit(text, max_new_tokens=30 + 10 * number, **how) for number, text in enumerate(texts)]
            answers.append([handle.result() for handle in each])
            kinds.append({type(batch).__name__ for batch in engine._driver.scheduler.held.batches.values()})
            engine.close()
    assert answers[0] == answers[1] and len(set(answers[0])) == 4
    assert kinds == [{"RetrievalBatch"}, {"DecodeBatch"}]


@pytest.mark.parametrize("spec", POOLED)
def test_a_conversation_goes_on(model, spec, monkeypatch):
    """The cache that comes back from the pool is asked again."""
    said = []
    for pools in (True, False):
        with monkeypatch.context() as here:
            if not pools:
                here.setattr(policy, "retrieval_plan", lambda cache: None)
            engine = kvkeep.Engine(model, Words(), spec, 64)
            context = engine.read("".join(map(chr, prompt(LONG).tolist())))
            said.append([context.ask(chr(410 + n) + chr(420 + n), max_new_tokens=12) for n in range(3)])
            engine.close()
    assert said[0] == said[1]


def test_what_a_retrieval_pool_takes(model):
    plans = {
        spec: policy.retrieval_plan(prefilled(model, spec, LONG).sequence.cache)
        for spec in RETRIEVING
        if "sent" not in spec
    }
    assert sorted(spec for spec, plan in plans.items() if plan) == POOLED
    assert policy.retrieval_plan(prefilled(model, "actqkv:reverse=True", LONG).sequence.cache) is None
    assert policy.retrieval_plan(prefilled(model, "infllm", LONG, budget=0.4).sequence.cache) is None
    assert policy.retrieval_plan(prefilled(model, "snapkv", LONG).sequence.cache) is None
    assert (
        policy.retrieval_plan(kvkeep.Engine(model, Words(), "infllm", 64).sequence.cache) is None
    )  # nothing is prefilled


def test_one_pool_at_a_time(model):
    """Another method's pool takes the place of one that is not used."""
    made = Scheduler(model, set())
    for spec in ("infllm", "quest", "infllm"):
        batch = made.decoding.batch_for(prefilled(model, spec, LONG))
        assert [type(each) for each in made.held.batches.values()] == [RetrievalBatch]
    made.held.batch_of[prefilled(model, "infllm", LONG)] = batch
    made.decoding.batch_for(prefilled(model, "quest", LONG))
    assert len(made.held.batches) == 2


def test_what_does_not_fit_is_decoded_alone(model):
    made = Scheduler(model, set(), 4, None, 100_000)
    assert type(made.decoding.batch_for(prefilled(model, "quest", LONG, 90))).__name__ == "DecodeBatch"


def test_a_layer_never_gets_more_than_it_has_room_for(model):
    one = prefilled(model, "actqkv:chunk=4", 380)
    batch = admitted([one])
    for token in range(400, 440):
        step(batch, token)
        counts = [int(layer.count[0]) for layer in batch.pool.rows_of.values()]
        assert min(counts) > 0 and max(counts) < batch.pool.plan.shape.most
        assert sum(counts) <= 2 * (batch.pool.plan.quota_limit // 4)


@pytest.mark.parametrize(
    "spec, unit", [("actqkv:chunk=4:density=False", 4), ("infllm", 8), ("quest", 8), ("tokenselect", 1)]
)
def test_every_step_retrieves_as_much_within_the_budget(model, spec, unit):
    """Tokens that wait for their chunk to fill are among the near ones, whose oldest chunk leaves for them."""
    one, near = prefilled(model, spec, LONG), set()
    batch = admitted([one])
    sizes = batch.pool.plan.sizes
    for token in range(400, 430):
        step(batch, token)
        row = batch.pool.by_row[0]
        near.add(row.end - row.begin)
        for layer in batch.pool.rows_of.values():
            assert int(layer.count[0]) == (64 - sizes.sinks - sizes.near) // unit
            assert sizes.sinks + int(layer.count[0]) * unit + int(layer.lengths[0, 0]) - row.begin <= 64
    assert near == {*range(sizes.near - unit + 1, sizes.near + 1)}


@pytest.mark.parametrize("spec", ["quest", "infllm"])
def test_offloaded_tokens_are_freed_with_the_row(model, spec):
    request = prefilled(model, spec, LONG, keeps=False)
    host = weakref.ref(request.sequence.cache.backend.states[0][0].host)
    batch = admitted([request])
    batch.release(request)
    request.finish()
    gc.collect()
    assert host() is None
