"""Drafts of prompts that are prefilled one after the other wait for each other."""
# ruff: noqa: F811 (the fixture `model`)

import pytest
import torch
from test_scheduler import WORDS, alone, assert_free, ids, model, run  # noqa: F401
from test_scheduler import request as prompt

from kvkeep.cache.decode.draft_pool import MOST_ROWS
from kvkeep.cache.decode.held_draft import HeldDraft
from kvkeep.compress.parse import parse
from kvkeep.engine import first_tokens, pace, prefilling
from kvkeep.engine.memory import row_bytes
from kvkeep.engine.packed_forward import PackedForward
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.errors import BadInput

TOKENS = 3  # of a draft


def request(model, seed, length=200, new=5, budget=40):
    config = SequenceConfig(model, WORDS, parse("kvkeep_lookahead", tokens=TOKENS, window=16), budget)
    return Request(config, ids(seed, length), Generation(new))


@pytest.fixture
def drafts(monkeypatch):
    """The rows of every draft, in order."""
    monkeypatch.setitem(prefilling.PACKED_TOKENS, "cpu", 256)  # one prompt in a pass
    own, found = HeldDraft.load, []

    def record(self, texts, *how):
        found.append(sum(len(text.rows) for text in texts))
        return own(self, texts, *how)

    monkeypatch.setattr(HeldDraft, "load", record)
    return found


def test_prompts_are_drafted_together_and_say_what_each_says_alone(model, drafts):
    requests = [request(model, seed, 180 + seed) for seed in range(MOST_ROWS + 3)]
    work = Scheduler(model, set())
    run(work, requests)
    assert drafts == [MOST_ROWS, 3]
    assert [one.answer.ids for one in requests] == [alone(one) for one in requests]
    assert not any(one.reserved for one in requests) and {one.kept_tokens for one in requests} == {40}
    assert_free(work)


def test_in_a_list_first_tokens_wait_for_no_draft(model, drafts, monkeypatch):
    work, known, add = Scheduler(model, set()), {}, Request.add
    monkeypatch.setattr(
        Request, "add", lambda self, *given: known.setdefault(id(self), len(drafts)) and None or add(self, *given)
    )
    requests = [request(model, seed) for seed in range(MOST_ROWS + 2)]
    run(work, requests)
    assert drafts == [MOST_ROWS, 2]
    assert [known[id(each)] for each in requests] == MOST_ROWS * [0] + 2 * [1]  # drafts before its first token
    assert [one.answer.ids for one in requests] == [alone(one) for one in requests]


@pytest.mark.parametrize("others", ["kvkeep_lookahead", "snapkv"])
@pytest.mark.parametrize("read", [True, False])
def test_a_draft_waits_for_few_passes_where_answers_are_read_and_in_a_list_for_drafts_alone(
    model, drafts, read, others, monkeypatch
):
    """However many prompts of other keys are prefilled meanwhile."""
    monkeypatch.setitem(pace.STEP_TOKENS, "cpu", 64)
    work, passes, one = Scheduler(model, set()), [], request(model, 1)
    forward = PackedForward.__call__
    monkeypatch.setattr(PackedForward, "__call__", lambda self, *given: passes.append(given) or forward(self, *given))
    one.interactive, one.owner = read, "one"
    work.submit(one)
    for seed in range(2, 20):
        other = request(model, seed) if others == "kvkeep_lookahead" else prompt(model, others, seed, 200)
        other.interactive = read
        work.submit(other)
    while one not in work.held.first_tokens:
        work.step()
    before = len(passes)
    while not drafts:
        work.step()
    wanted = first_tokens.MOST_PASSES if read else MOST_ROWS - 1
    assert len(passes) - before == (1 if others == "snapkv" else wanted)
    while work.held.num_requests:
        work.step()
    assert one.answer.ids == alone(one)


def test_a_first_token_that_ends_the_answer_waits_for_the_draft(model, drafts):
    """What is kept is known when an answer is there."""
    free, short = request(model, 1), request(model, 1, new=1)
    run(Scheduler(model, set()), [free])
    end = request(model, 1)
    for one, eos in ((short, set()), (end, {free.answer.ids[0]})):
        done = []
        one.notify = lambda mine=one, done=done: done.append((mine.done, mine.kept_tokens, len(drafts)))
        drafts.clear()
        run(Scheduler(model, eos), [one])
        assert all(kept == 40 and number == 1 for _, kept, number in done) and done[-1][0]
    assert short.answer.ids == free.answer.ids[:1] and not end.answer.ids


def test_a_prompt_alone_is_drafted_in_the_step_that_delivers_its_first_token(model, drafts):
    work, one = Scheduler(model, set()), request(model, 1)
    work.submit(one)
    work.step()
    assert not drafts and not one.answer.ids
    work.step()
    assert drafts == [1] and len(one.answer.ids) == 1
    while work.held.num_requests:
        work.step()
    assert one.answer.ids == alone(one)


def test_they_do_not_wait_for_prompts_that_memory_keeps_out(model, drafts):
    requests = [request(model, seed) for seed in range(6)]
    total = Scheduler(model, set(), memory=10**9)
    run(total, requests[:1])
    most = total.memory.cap.largest_prompt
    work = Scheduler(model, set(), memory=3 * most)
    run(work, requests[1:])
    assert sum(drafts) == 6 and max(drafts) < 5
    assert [one.answer.ids for one in requests] == [alone(one) for one in requests]
    assert_free(work)


def test_nor_for_more_than_a_draft_can_hold(model, drafts, monkeypatch):
    monkeypatch.setattr(first_tokens, "most_held", lambda model: 1)
    requests = [request(model, seed) for seed in range(3)]
    run(Scheduler(model, set()), requests)
    assert drafts == [1, 1, 1] and [one.answer.ids for one in requests] == [alone(one) for one in requests]


@pytest.mark.parametrize("error", [ValueError("mine"), torch.OutOfMemoryError("of a draft")])
def test_a_draft_that_fails_costs_one_request_and_memory_that_is_short_none(model, drafts, error, monkeypatch):
    """One that runs out of memory beside others is tried again."""
    requests, own, failed = [request(model, seed, 180 + seed) for seed in range(4)], HeldDraft.load, []

    def fail(self, texts, *how):
        if 181 in [row.position for text in texts for row in text.rows.values()] and len(failed) < 2:
            failed.append(len(texts))
            raise error
        return own(self, texts, *how)

    monkeypatch.setattr(HeldDraft, "load", fail)
    work = Scheduler(model, set())
    run(work, requests)
    good = [one for one in requests if one.error is None]
    assert len(good) == (3 if isinstance(error, ValueError) else 4)
    assert [one.answer.ids for one in good] == [alone(one) for one in good]
    assert_free(work)


def test_one_that_is_cancelled_while_it_waits_is_gone(model, drafts):
    work = Scheduler(model, set())
    first, second, third = (work.submit(request(model, seed)) for seed in range(3))
    work.step(), work.step()
    assert not drafts and len(work.held.first_tokens) == 2
    first.cancelled = True
    while work.held.num_requests:
        work.step()
    assert first.done and len(first.answer.ids) == 1 and drafts == [2]
    assert [one.answer.ids for one in (second, third)] == [alone(one) for one in (second, third)]
    assert_free(work)


def test_a_prompt_reserves_what_its_draft_takes(model):
    def ask(memory):
        one = request(model, 1)
        run(Scheduler(model, set(), memory=memory), [one])
        return one

    one = request(model, 1)
    assert one.draft_tokens > 40
    needed = row_bytes(model, one.prefill_tokens + one.draft_tokens)
    assert ask(needed).answer.ids == alone(one)
    assert isinstance(ask(needed - 1).error, BadInput)
