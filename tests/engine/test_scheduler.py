"""Requests that come and go say what each says alone."""

from unittest.mock import Mock

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING

from kvkeep.cache.decode.retrieval_pool import RetrievalPool
from kvkeep.cache.decode.step_pool import StepPool
from kvkeep.compress.parse import parse
from kvkeep.engine import pace
from kvkeep.engine.batch import InflightStep
from kvkeep.engine.memory import row_bytes
from kvkeep.engine.pooled_batch import PooledBatch
from kvkeep.engine.request import Request, State
from kvkeep.engine.retrieval_batch import RetrievalBatch
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import SequenceConfig

WORDS = tiny_chat.tokenizer()


@pytest.fixture(scope="module")
def model():
    made = tiny_chat.model().double()  # a batch rounds otherwise than a row: too little to change what is kept
    for layer in made.model.layers:
        layer.self_attn.q_proj.weight.data *= 5
    return made


def ids(seed, length):
    return torch.randint(5, 120, (length,), generator=torch.Generator().manual_seed(seed))


def request(model, spec, seed, length, new=8, budget=40, schedule=None, storage=None, **how):
    options = {"schedule": schedule, "storage": storage}
    config = SequenceConfig(model, WORDS, parse(spec), budget, cache_options=options)
    return Request(config, ids(seed, length), Generation(new, **how))


def alone(one):
    """The answer of model and cache, without an engine."""
    sequence = one.config.new_sequence()
    logits, written = sequence.prefill(one.ids), []
    for _ in range(one.how.max_new_tokens):
        written.append(int(logits.argmax()))
        logits = sequence.extend(torch.tensor(written[-1:]))[-1]
    return written


def run(work, requests):
    work.run(requests)
    assert not work.held.num_requests


def assert_free(work):
    """Nothing of the pool is held."""
    for batch in work.held.batches.values():
        assert not list(batch.requests)
        if isinstance(pool := getattr(batch, "pool", None), StepPool):
            assert not pool.allocated and not any(int(block.rows.active.sum()) for block in pool.steps.blocks)
        elif isinstance(pool, RetrievalPool):
            assert not pool.by_row and not pool.counts.any()
        elif pool:
            assert all(free.spans == [(0, pool.tokens)] for free in pool.free.values()) and not pool.allocated
            assert not any(int(places.lengths.sum() + places.active.sum()) for places in pool.places.values())


@pytest.mark.core
@pytest.mark.parametrize("spec", [*EVICTING, *RETRIEVING, "snapkv+adakv", "snapkv+pyramid"])
def test_together_is_alone_whoever_comes_and_goes(model, spec):
    budget = 64 if parse(spec).retrieval else 40
    work = Scheduler(model, set(), max_rows=3)
    requests = [request(model, spec, seed, 60 + 37 * seed, 3 + 3 * seed, budget) for seed in range(5)]
    run(work, requests)
    for one in requests:
        assert one.answer.ids == alone(one) and "".join(one.deltas) == one.text and one.error is None
    assert_free(work)


@pytest.mark.parametrize(
    "spec, storage",
    [
        ("full", "int8"), ("full", "int4"), ("kvkeep", "int8"), ("snapkv+adakv", "int4"), ("intelllm", "int8"),
        ("pyramidkv", "int4"), ("cake", "int8"),
    ],
)  # fmt: skip
def test_quantized_rows_together_are_alone(model, spec, storage):
    work = Scheduler(model, set(), max_rows=3)
    requests = [request(model, spec, seed, 60 + 37 * seed, 5 + 15 * seed, 40, "prompt", storage) for seed in range(4)]
    run(work, requests)
    assert [one.answer.ids for one in requests] == [alone(one) for one in requests]
    assert_free(work)


OWN_CHUNKS = {name: f"{name}:chunk=64" for name in ("echo", "compactor", "kvkeep_context")}  # they are never cut
CHUNKED = [OWN_CHUNKS.get(name, name) for name in EVICTING if name != "full"]


@pytest.mark.core
@pytest.mark.parametrize(
    "spec, schedule, storage",
    [
        (spec, schedule, None)
        for spec in [*CHUNKED, "snapkv+adakv", "h2o+adakv", "echo:chunk=32+shared"]
        for schedule in (["prompt", None] if parse(spec).schedule.every else ["prompt"])  # its own, if it has one
    ]
    + [
        (spec, "prompt", storage)
        for spec in ["snapkv", "knorm", "keydiff", "h2o", "snapkv+adakv", "kvkeep_lookahead"]
        for storage in ["int8", "int4"]
    ],
)
def test_a_prompt_in_chunks_beside_others_keeps_what_it_keeps_at_once(model, spec, schedule, storage, monkeypatch):
    """The selection is exact: evicted from, and quantized, at the end alone."""
    monkeypatch.setitem(pace.STEP_TOKENS, "cpu", 64)
    monkeypatch.setattr("kvkeep.engine.prefilling.attention_cost", lambda _: 0.0)
    work = Scheduler(model, set(), memory=10**9)
    other = work.submit(request(model, spec, 1, 50, 400, schedule="prompt"))
    other.interactive = True
    while not work.held.batch_of:
        work.step()
    late = request(model, spec, 2, 333, 9, schedule=schedule, storage=storage)
    late.keeps_cache, chunks, held = True, [], []
    late.progress = lambda progress: (chunks.append(progress.done), held.append(late.sequence.cache.nbytes))
    work.submit(late)
    while not late.done:
        work.step()
    work.decoding.release_finished()
    assert chunks == [64, 128, 192, 256, 320, 333] and late.selection == "exact"
    assert len(other.answer.ids) >= 6  # it was not kept waiting
    assert max(held) <= row_bytes(model, late.prefill_tokens + late.draft_tokens)  # what it reserved
    whole = late.config.new_sequence()
    whole.prefill(late.ids)
    assert late.answer.ids == alone(late)
    for token in late.answer.ids[:-1]:
        whole.extend(torch.tensor([token]))
    kept, want = ([each.cache.kept(layer) for layer in range(2)] for each in (late.sequence, whole))
    assert kept == want and late.sequence.token_ids == whole.token_ids


def test_a_last_chunk_of_one_token_is_no_decode_step(model, monkeypatch):
    """Old: 321 = 5 × 64 + 1 tokens were all kept."""
    monkeypatch.setitem(pace.STEP_TOKENS, "cpu", 64)
    monkeypatch.setattr("kvkeep.engine.prefilling.attention_cost", lambda _: 0.0)
    work = Scheduler(model, set())
    other, late = work.submit(request(model, "snapkv", 1, 50, 400)), request(model, "snapkv", 2, 321, 3)
    other.interactive = late.keeps_cache = True
    work.step()
    work.submit(late)
    while not late.done:
        work.step()
    assert late.sequence.cache.report().kept["prompt"] == 40 and late.answer.ids == alone(late)


def test_with_too_little_memory_the_running_selection_takes_over(model, monkeypatch):
    from kvkeep.engine import sequence

    monkeypatch.setattr(sequence, "free_device_bytes", lambda device: 1000)
    exact, work = request(model, "snapkv", 0, 100), Scheduler(model, set())
    run(work, [exact])
    assert exact.selection == "exact"  # it was prefilled at once all the same
    config = SequenceConfig(model, WORDS, parse("snapkv"), 40, prefill_chunk_size=32)
    chunked = Request(config, ids(0, 100), Generation(4))
    run(work, [chunked])
    assert chunked.selection == "running"
    full = request(model, "full", 0, 100)
    run(work, [full])
    assert full.selection == ""


def test_short_prompts_are_prefilled_in_one_pass(model):
    sizes, work = [], Scheduler(model, set())
    forward = work.prefilling.forward.__call__

    def counted(chunks, *how):
        sizes.append([len(new) for _, new in chunks])
        return forward(chunks, *how)

    work.prefilling.forward, counted.shares_forward = counted, True
    requests = [request(model, "kvkeep", seed, 60 + seed, 4) for seed in range(6)]
    run(work, requests)
    assert sizes == [[60, 61, 62, 63, 64, 65]]
    assert [one.answer.ids for one in requests] == [alone(one) for one in requests]


@pytest.mark.parametrize("spec", ["kvkeep", "h2o", "actqkv"])
def test_decode_steps_pass_between_the_layers_of_a_prefill(model, spec, monkeypatch):
    monkeypatch.setattr(PooledBatch, "replays", property(lambda batch: bool(batch.by_row)))
    monkeypatch.setattr(RetrievalBatch, "replays", PooledBatch.replays)
    work = Scheduler(model, set())
    monkeypatch.setattr(work.pace, "layers_between", lambda layers: 1)
    quick, slow = (work.submit(request(model, spec, seed, 50 + seed, new)) for seed, new in ((1, 6), (2, 30)))
    quick.interactive = slow.interactive = quick.keeps_cache = True
    while len(slow.answer.ids) < 2:
        work.step()
    before, late = (len(quick.answer.ids), len(slow.answer.ids)), work.submit(request(model, spec, 3, 200, 3))
    work.step()
    assert len(slow.answer.ids) == before[1] + 2  # the pass has two layers
    while not late.done:
        work.step()
    for one in (quick, slow, late):
        while not one.done:
            work.step()
        assert one.answer.ids == alone(one)
    work.decoding.release_finished()
    assert quick.sequence.token_ids[len(quick.ids) :] == quick.answer.ids[:-1] and before[0] < 6
    assert_free(work)


@pytest.mark.parametrize("spec", ["kvkeep", "snapkv+adakv", "h2o"])
def test_a_first_token_is_delivered_between_the_layers_of_the_next_pass(model, spec, monkeypatch):
    """The device goes on with the next prompt; whoever waits gets the token when it has come, and a row."""
    monkeypatch.setattr(PooledBatch, "replays", property(lambda batch: bool(batch.by_row)))
    work = Scheduler(model, set())
    work.first_tokens.looks_between_layers = True  # as on a GPU
    monkeypatch.setattr(work.pace, "layers_between", lambda layers: 1)
    quick, late = (work.submit(request(model, spec, seed, 300 + seed, 6)) for seed in (1, 2))
    quick.interactive = late.interactive = True
    while not work.held.first_tokens:
        work.step()
    assert quick.state is State.SAMPLED and not quick.answer.ids  # the next prompt comes first
    states, end = [], work.first_tokens._end
    monkeypatch.setattr(work.first_tokens, "_end", lambda each: (states.append(late.state), end(each)))
    ready, came = InflightStep.is_ready, iter([False, True])
    monkeypatch.setattr(InflightStep, "is_ready", property(lambda step: next(came, True) and ready.fget(step)))
    while not late.done:
        work.step()
    assert states == [State.PREFILLING, State.SAMPLED]  # the first within the pass of the other, the last at once
    while not quick.done:
        work.step()
    assert [one.answer.ids for one in (quick, late)] == [alone(one) for one in (quick, late)]
    assert_free(work)


@pytest.mark.parametrize(("spec", "passes"), [("kvzip:chunk=50", 4 + 1), ("lookahead:tokens=5:window=16", 1 + 6 + 1)])
def test_decode_steps_pass_between_the_passes_a_method_makes(model, spec, passes, monkeypatch):
    monkeypatch.setattr(PooledBatch, "replays", property(lambda batch: bool(batch.by_row)))
    work = Scheduler(model, set())
    monkeypatch.setattr(work.pace, "layers_between", lambda layers: layers)
    running = work.submit(request(model, "snapkv", 1, 50, 40))
    running.interactive = True
    while len(running.answer.ids) < 2:
        work.step()
    before, late = len(running.answer.ids), work.submit(request(model, spec, 3, 200, 3))
    steps = 1 + bool(late.config.method.draft)  # a draft follows the first token
    for _ in range(steps):
        work.step()
    assert len(running.answer.ids) == before + passes + steps
    while work.held.num_requests:
        work.step()
    assert [one.answer.ids for one in (running, late)] == [alone(one) for one in (running, late)]


def test_while_nobody_reads_prompts_are_prefilled_first(model):
    work = Scheduler(model, set(), max_rows=2)
    first, *others = [work.submit(request(model, "kvkeep", seed, 600, 5)) for seed in range(3)]
    work.step()
    assert [len(one.answer.ids) for one in (first, *others)] == [0, 0, 0]  # its first token waits for the next pass
    work.step()
    assert [len(one.answer.ids) for one in (first, *others)] == [1, 0, 0]
    work.step()  # two rows: the third prompt has to wait, so they decode
    work.step()
    assert [len(one.answer.ids) > 1 for one in (first, *others)] == [True, True, False]
    while work.held.num_requests:
        work.step()
    assert [one.answer.ids for one in (first, *others)] == [alone(one) for one in (first, *others)]


def test_who_does_not_fit_waits_and_who_never_will_is_refused_with_numbers(model):
    work = Scheduler(model, set(), 4, max_tokens=50)
    small = [request(model, "snapkv", seed, 70) for seed in range(3)]
    large = request(model, "snapkv", 9, 70, new=40)
    run(work, [*small, large])
    assert [one.answer.ids for one in small] == [alone(one) for one in small]
    assert "keys and values of one sequence take" in str(large.error) and "max_tokens=" in str(large.error)
    assert_free(work)


def test_memory_that_runs_out_in_a_prefill_costs_one_request(model):
    work = Scheduler(model, set())
    forward = work.prefilling.forward.__call__

    def sometimes(chunks, *how):
        if any(len(new) == 99 for _, new in chunks):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB\nmore")
        return forward(chunks, *how)

    sometimes.shares_forward = True
    work.prefilling.forward = sometimes
    good, bad, other = (request(model, "snapkv", 0, length) for length in (70, 99, 80))
    run(work, [good, bad, other])
    assert isinstance(bad.error, torch.OutOfMemoryError) and not bad.answer.ids
    assert [one.answer.ids for one in (good, other)] == [alone(one) for one in (good, other)]


def test_memory_that_runs_out_beside_a_prompt_that_has_begun_is_tried_again(model, monkeypatch):
    monkeypatch.setitem(pace.STEP_TOKENS, "cpu", 64)
    work, failed = Scheduler(model, set()), []
    forward = work.prefilling.forward.__call__

    def short(chunks, *how):
        if sum(each.started for each in work.held.waiting) > 1 and len(failed) < 9:
            failed.append(chunks)
            raise torch.OutOfMemoryError("two prompts at a time")
        return forward(chunks, *how)

    short.shares_forward = True
    work.prefilling.forward = short
    both = [request(model, "snapkv", seed, 150 + seed) for seed in range(2)]
    for one in both:
        one.interactive, one.owner = True, str(one.ids)
    run(work, both)
    assert failed and [one.answer.ids for one in both] == [alone(one) for one in both]


@pytest.mark.parametrize("spec", ["snapkv", "h2o", "infllm"])
def test_memory_that_runs_out_while_a_pool_grows_restarts_its_requests_in_another(model, spec, monkeypatch):
    """Some layers have other buffers by then than those a captured step knows."""
    work, failed = Scheduler(model, set()), []
    first = work.submit(request(model, spec, 1, 80, 30, 64))
    while len(first.answer.ids) < 4:
        work.step()
    pool = next(iter(work.held.batches.values())).pool

    def fail(*_):
        failed.append([one for one in work.held.batch_of if one.state is State.DECODING])
        raise torch.OutOfMemoryError("of one layer")

    monkeypatch.setattr(pool, "fits", lambda *_: False)
    monkeypatch.setattr(pool, "grow", fail)
    others = [request(model, spec, seed, 80 + seed, 6, 64) for seed in (2, 3)]
    work.run(others)
    while work.held.num_requests:
        work.step()
    assert failed == [[first]] and pool not in [getattr(batch, "pool", None) for batch in work.held.batches.values()]
    assert [one.answer.ids for one in (first, *others)] == [alone(one) for one in (first, *others)]
    assert_free(work)


def test_a_kept_cache_is_completed_before_its_pool_is_given_up(model, monkeypatch):
    """Its answer ended in the step in which the pool fails: its row was not released yet."""
    work = Scheduler(model, set())
    quick, slow = (work.submit(request(model, "snapkv", seed, 80, new)) for seed, new in ((1, 6), (2, 30)))
    quick.keeps_cache = quick.interactive = True
    while len(quick.answer.ids) < 5:
        work.step()
    pool = work.held.batches["append: None"].pool
    monkeypatch.setattr(pool, "fits", lambda *_: False)
    monkeypatch.setattr(pool, "grow", Mock(side_effect=torch.OutOfMemoryError("of one layer")))
    late = work.submit(request(model, "snapkv", 3, 80, 6))
    late.interactive = True  # it is admitted in the step that prefills it
    work.step()
    assert quick.done and slow.state is late.state is State.WAITING
    while work.held.num_requests:
        work.step()
    assert quick.sequence.token_ids[len(quick.ids) :] == quick.answer.ids[:-1]
    assert [one.answer.ids for one in (quick, slow, late)] == [alone(one) for one in (quick, slow, late)]
    assert_free(work)


def test_a_request_does_not_leave_out_a_state(model):
    one = request(model, "snapkv", 1, 80)
    with pytest.raises(AssertionError, match="a request that is WAITING cannot be DECODING"):
        one.move(State.DECODING)
    run(Scheduler(model, set()), [one])
    with pytest.raises(AssertionError, match="DONE cannot be WAITING"):
        one.restart()


def test_an_end_ends_a_row_and_only_it(model):
    one = request(model, "snapkv", 1, 80)
    run(Scheduler(model, set()), [one])
    stop = one.answer.ids[3]
    again, other = request(model, "snapkv", 1, 80), request(model, "snapkv", 2, 90)
    run(Scheduler(model, {stop}), [again, other])
    assert again.answer.ids == one.answer.ids[: one.answer.ids.index(stop)]
    assert stop not in other.answer.ids


def test_a_stop_text_ends_an_answer_and_is_not_shown(model):
    free = request(model, "snapkv", 1, 80, 30)
    run(Scheduler(model, set()), [free])
    at = len(free.text) // 2
    stop = free.text[at : at + 2]
    for stops in (stop, [stop, "never to be said"]):
        one = request(model, "snapkv", 1, 80, 30, stop=stops)
        run(Scheduler(model, set()), [one])
        assert one.text == free.text[: free.text.find(stop)] == "".join(one.deltas) and len(one.answer.ids) < 30


@pytest.mark.parametrize("spec", ["snapkv", "h2o", "infllm"])
def test_a_cancelled_request_frees_its_row_at_once(model, spec):
    work = Scheduler(model, set())
    stays, goes = (request(model, spec, seed, 80, 12, 64) for seed in (1, 2))
    work.submit(stays), work.submit(goes)
    never = work.submit(request(model, spec, 3, 80, 12, 64))
    never.cancelled = True
    work.drop_cancelled()
    assert never.done and not never.answer.ids
    for _ in range(4):
        work.step()
    goes.cancelled = True
    while not stays.done:
        work.step()
    assert goes.done and goes.error is None and 0 < len(goes.answer.ids) < 12
    assert stays.answer.ids == alone(stays)
    assert_free(work)


def test_a_cancelled_request_that_waits_for_room_is_dropped(model):
    work = Scheduler(model, set(), max_tokens=100)
    stays, goes = (work.submit(request(model, "snapkv", seed, 80, 12, 64)) for seed in (1, 2))
    work.step(), work.step()
    assert work.held.prefilled == [goes]
    goes.cancelled = True
    work.drop_cancelled()
    assert goes.done and len(goes.answer.ids) == 1 and not work.held.prefilled
    while not stays.done:
        work.step()
    assert stays.answer.ids == alone(stays) and len(goes.answer.ids) == 1


def test_a_callback_that_fails_costs_its_own_request(model):
    def fail(*_):
        raise ValueError("mine")

    bad, good = request(model, "snapkv", 1, 80), request(model, "snapkv", 2, 80)
    bad.progress = fail
    late = request(model, "snapkv", 3, 80)
    late.notify = fail
    run(Scheduler(model, set()), [bad, good, late])
    assert str(bad.error) == "mine" and late.cancelled and good.answer.ids == alone(good)


def test_a_pool_grows_under_its_rows(model):
    work = Scheduler(model, set())
    first = work.submit(request(model, "snapkv", 1, 80, 30))
    for _ in range(5):
        work.step()
    sizes = [(pool := work.held.batches["append: None"].pool).tokens]
    later = [request(model, "full", seed, 100 + 50 * seed, 6) for seed in range(4)]
    work.run(later)
    while not first.done:
        work.step()
    assert pool.tokens > sizes[0] and pool is work.held.batches["append: None"].pool
    assert [one.answer.ids for one in (first, *later)] == [alone(one) for one in (first, *later)]
    assert_free(work)
