"""Logprobs are those of a solo forward pass, and a constraint is obeyed, whatever decodes the answer."""

import pytest
import torch
from test_scheduler import WORDS, alone, model, request, run  # noqa: F401

from kvkeep.engine.batch import DecodeBatch
from kvkeep.engine.pooled_batch import PooledBatch
from kvkeep.engine.retrieval_batch import RetrievalBatch
from kvkeep.engine.sampling import Generation
from kvkeep.engine.scheduler import Scheduler
from kvkeep.errors import BadParameter

BATCHES = [  # method, budget, what decodes it
    ("snapkv", 40, PooledBatch),
    ("h2o", 40, PooledBatch),
    ("tokenselect", 96, RetrievalBatch),
    ("clusterkv", 96, DecodeBatch),
]
DIGITS = WORDS("0123456789").input_ids
TOLERANCE = 1e-7  # retrieval rotates with tables of float32


def solo_logits(one):
    """Of every token of the answer, in a forward pass of its own [tokens, vocabulary]"""
    sequence = one.config.new_sequence()
    logits = [sequence.prefill(one.ids)]
    logits += [sequence.extend(torch.tensor([token]))[-1] for token in one.answer.ids[:-1]]
    return torch.stack(logits)


@pytest.mark.parametrize(("spec", "budget", "kind"), BATCHES)
@pytest.mark.parametrize("how", [{}, {"temperature": 1.5, "top_k": 40}])
def test_logprobs_are_those_of_a_solo_forward_pass(model, spec, budget, kind, how):  # noqa: F811
    work = Scheduler(model, set(), max_rows=4)
    wanted = [3, None, 0, 400]
    requests = [
        request(model, spec, seed, 130 + 17 * seed, 5 + seed, budget, logprobs=most, **how)
        for seed, most in enumerate(wanted)
    ]
    run(work, requests)
    assert kind in {type(batch) for batch in work.held.batches.values()}
    for one, most in zip(requests, wanted, strict=True):
        if most is None:
            assert one.logprobs == []
            continue
        each, most = solo_logits(one).double().log_softmax(-1), min(most, 258)
        assert [found.token for found in one.logprobs] == one.answer.ids
        likeliest = each.topk(most)
        for row, found in enumerate(one.logprobs):
            assert found.logprob == pytest.approx(float(each[row, found.token]), abs=TOLERANCE)
            assert [token for token, _ in found.top] == likeliest.indices[row].tolist()
            assert [lp for _, lp in found.top] == pytest.approx(likeliest.values[row].tolist(), abs=TOLERANCE)


class Only:
    """Tokens of a list; after `length` of them, eos alone. It notes what it was told."""

    def __init__(self, tokens, length=None, eos=(), short=False):
        self.tokens, self.length, self.eos, self.told, self.short = tokens, length, eos, [], short

    def allowed(self):
        mask = torch.zeros(100 if self.short else 258, dtype=torch.bool)
        over = self.length is not None and len(self.told) >= self.length
        mask[list(self.eos if over else self.tokens)] = True
        return mask

    def advance(self, token):
        self.told.append(token)


@pytest.mark.parametrize(("spec", "budget", "kind"), BATCHES)
@pytest.mark.parametrize("how", [{}, {"temperature": 1.5, "top_p": 0.9}])
def test_a_constraint_is_obeyed_and_others_beside_it_are_not_changed(model, spec, budget, kind, how):  # noqa: F811
    made = []

    def digits():
        made.append(Only(DIGITS))
        return made[-1]

    def requests(constraint):
        same = [request(model, spec, seed, 100 + 17 * seed, 6 + seed, budget, **how) for seed in range(3)]
        return [*same, request(model, spec, 1, 117, 9, budget, constraint=constraint, logprobs=2, **how)]

    free, bound = requests(None), requests(digits)
    for each in (free, bound):
        work = Scheduler(model, set(), max_rows=4)
        run(work, each)
        assert kind in {type(batch) for batch in work.held.batches.values()}
    assert [one.answer.ids for one in bound[:3]] == [one.answer.ids for one in free[:3]]
    answer = bound[3].answer.ids
    assert len(answer) == 9 and set(answer) <= set(DIGITS) and answer != free[3].answer.ids
    assert len(made) == 1 and made[0].told == answer[:-1]
    assert bound[3].finish_reason == "length" and len(bound[3].logprobs) == 9
    each = solo_logits(bound[3]).double().log_softmax(-1)  # as the model has it: not of digits alone
    assert [found.logprob for found in bound[3].logprobs] == pytest.approx(
        each[range(9), answer].tolist(), abs=TOLERANCE
    )
    if not how:
        assert answer == [DIGITS[i] for i in each[:, DIGITS].argmax(-1).tolist()]


@pytest.mark.parametrize(("spec", "budget", "kind"), BATCHES)
def test_an_answer_ends_only_where_its_constraint_allows(model, spec, budget, kind):  # noqa: F811
    free = request(model, spec, 0, 100, 8, budget)
    run(Scheduler(model, set()), [free])
    first = free.answer.ids[0]  # would end every answer at once
    others = [token for token in range(258) if token != first]
    ended = request(model, spec, 0, 100, 8, budget)
    bound = request(model, spec, 0, 100, 8, budget, constraint=lambda: Only(others, 4, [first]))
    stuck = request(model, spec, 0, 100, 8, budget, constraint=lambda: Only(others, 5), logprobs=0)
    run(Scheduler(model, {first}), [ended, bound, stuck])
    assert (ended.answer.ids, ended.finish_reason) == ([], "stop")
    assert (len(bound.answer.ids), bound.finish_reason) == (4, "stop")
    assert (len(stuck.answer.ids), stuck.finish_reason, len(stuck.logprobs)) == (5, "stop", 5)  # nothing may follow


class Failing(Only):
    def advance(self, token):
        super().advance(token)
        if len(self.told) == 3:
            raise ZeroDivisionError("in a grammar")


@pytest.mark.parametrize(("spec", "budget", "kind"), BATCHES)
def test_a_constraint_that_fails_ends_its_own_answer_alone(model, spec, budget, kind):  # noqa: F811
    good = request(model, spec, 0, 100, 8, budget)
    bad = request(model, spec, 1, 100, 8, budget, constraint=lambda: Failing(DIGITS))
    worse = request(model, spec, 2, 100, 8, budget, constraint=lambda: 1 / 0)
    run(Scheduler(model, set()), [bad, good, worse])
    assert isinstance(bad.error, ZeroDivisionError) and len(bad.answer.ids) == 3 and bad.finish_reason == "error"
    assert isinstance(worse.error, ZeroDivisionError) and not worse.answer.ids
    assert good.answer.ids == alone(good)


def test_a_constraint_knows_every_token_where_steps_are_launched_ahead(model, monkeypatch):  # noqa: F811
    init = PooledBatch.__init__

    def ahead(self, *args):
        init(self, *args)
        self.lag = 1  # as on a GPU

    monkeypatch.setattr(PooledBatch, "__init__", ahead)
    others = [request(model, "snapkv", seed, 100, 12, logprobs=1) for seed in range(2)]
    bound = request(model, "snapkv", 5, 100, 6, constraint=lambda: Only(DIGITS[:-1], 4, DIGITS[-1:]), logprobs=0)
    bound.interactive = others[0].interactive = True
    work = Scheduler(model, set())
    for one in others:
        work.submit(one)
    for _ in range(4):
        work.step()
    (batch,) = work.held.batches.values()
    assert len(batch.inflight) == 1
    work.run([bound])
    assert all(token in DIGITS[:-1] for token in bound.answer.ids[:4]) and bound.answer.ids[4:] == DIGITS[-1:] * 2
    assert [found.token for found in bound.logprobs] == bound.answer.ids
    while work.held.num_requests:
        work.step()
    assert all(one.answer.ids == alone(one) for one in others)
    assert all([found.token for found in one.logprobs] == one.answer.ids for one in others)


def test_a_mask_of_fewer_tokens_forbids_the_rest(model):  # noqa: F811
    one = request(model, "snapkv", 0, 100, 8, constraint=lambda: Only(range(100), short=True))
    run(Scheduler(model, set()), [one])
    assert max(one.answer.ids) < 100


def test_a_restarted_answer_has_a_fresh_constraint_and_fresh_logprobs(model):  # noqa: F811
    made = []
    one = request(model, "snapkv", 0, 100, 8, logprobs=1, constraint=lambda: made.append(Only(DIGITS)) or made[-1])
    work = Scheduler(model, set())
    work.submit(one)
    for _ in range(3):
        work.step()
    assert len(one.logprobs) > 1
    for batch in work.held.batches.values():
        batch.clear()
    work.held.restart([one])
    while not one.done:
        work.step()
    assert len(made) == 2 and made[1].told == one.answer.ids[:-1] and len(one.logprobs) == 8


def test_what_became_of_a_request_is_told(model):  # noqa: F811
    long, cut, gone = (request(model, "snapkv", 0, 100, 8) for _ in range(3))
    run(Scheduler(model, set()), [long])
    assert long.finish_reason == "length"
    assert long.kept_tokens == 40 and long.kept_bytes >= 2 * 2 * 2 * 40 * 8 * 8  # layers, heads, keys and values
    cut.how = Generation(8, stop=long.text[2:4])
    work = Scheduler(model, set())
    run(work, [cut])
    assert cut.finish_reason == "stop"
    gone.cancelled = True
    run(work, [gone])
    assert gone.finish_reason == "cancelled"


@pytest.mark.parametrize("bad", [{"logprobs": -1}, {"logprobs": True}, {"logprobs": 1.5}, {"constraint": 3}])
def test_options_that_cannot_be_are_refused(bad):
    with pytest.raises(BadParameter, match=next(iter(bad))):
        Generation(**bad)
