"""Bias, penalties and min_tokens are a plain loop's, in every kind of batch, and of their own row alone."""

import pytest
import torch
from test_logprobs import BATCHES, DIGITS
from test_scheduler import WORDS, alone, model, request, run  # noqa: F401

from kvkeep.engine.logit_edits import Edit, LogitEdits
from kvkeep.engine.pooled_batch import PooledBatch
from kvkeep.engine.sampling import Generation, SamplingRows
from kvkeep.engine.scheduler import Scheduler
from kvkeep.errors import BadParameter

EACH = [
    {"logit_bias": {3: 2.5, 7: -100.0, 11: 100}},
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"min_tokens": 3},
    {
        "logit_bias": {3: -4.0, 90: 1.0},
        "frequency_penalty": 0.6,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.3,
        "min_tokens": 2,
    },
]


def plain(logits, how, prompt, answer, ends):
    """The edited logits, told token by token."""
    found = []
    for token, logit in enumerate(logits):
        logit += how.logit_bias.get(token, 0.0)
        if token in prompt or token in answer:
            logit = logit / how.repetition_penalty if logit > 0 else logit * how.repetition_penalty
        times = sum(said == token for said in answer)
        logit -= times * how.frequency_penalty
        if times:
            logit -= how.presence_penalty
        found.append(float("-inf") if token in ends and len(answer) < how.min_tokens else logit)
    return found


def edit_of(how, prompt, answer, ends, size):
    """Of a `Generation`, without a request."""
    return Edit(how, torch.tensor(prompt), answer, ends, size)


@pytest.mark.parametrize("options", EACH, ids=lambda each: "+".join(each))
def test_edited_logits_are_a_plain_loops_step_after_step(options):
    """Rows come and go; those that are not edited are not touched."""
    draw, size, ends = torch.Generator().manual_seed(0), 100, [4, 9]
    edits, rows = LogitEdits("cpu"), {}

    def put(row, how):
        prompt, answer = torch.randint(size, (2, 12), generator=draw).tolist()
        rows[row] = how, prompt, answer[:1]
        edits.set(row, edit_of(how, prompt, answer[:1], ends, size))

    put(2, Generation(**options))
    put(0, Generation(repetition_penalty=1.9, min_tokens=9))
    for step in range(6):
        if step == 2:
            put(3, Generation(**options))
        if step == 4:
            edits.set(0, None)
            del rows[0]
            put(2, Generation(**options))  # a reused row begins anew
        logits = torch.randn(4, size, generator=draw) * 4
        found = edits.apply(logits.clone())
        want = logits.double()
        for row, (how, prompt, answer) in rows.items():
            want[row] = torch.tensor(plain(logits[row].tolist(), how, prompt, answer, ends))
        torch.testing.assert_close(found.double(), want, atol=1e-4, rtol=1e-5)
        untouched = [row for row in range(4) if row not in rows]
        assert found[untouched].equal(logits[untouched])
        tokens = torch.tensor([4, 9, 4, 50]) + step % 2
        edits.count(tokens)
        for row, (_, _, answer) in rows.items():
            answer.append(int(tokens[row]))


def plain_answer(one, ends):
    """The answer of model and cache, each token the likeliest by the plain loop."""
    sequence = one.config.new_sequence()
    logits, answer, prompt = sequence.prefill(one.ids), [], set(one.ids.tolist())
    while len(answer) < one.how.max_new_tokens:
        edited = plain(logits.tolist(), one.how, prompt, answer, ends)
        token = max(range(len(edited)), key=edited.__getitem__)
        if token in ends:
            break
        answer.append(token)
        logits = sequence.extend(torch.tensor([token]))[-1]
    return answer


@pytest.mark.parametrize(("spec", "budget", "kind"), BATCHES)
@pytest.mark.parametrize("ahead", [0, 1])
def test_answers_are_a_plain_loops_beside_others_and_after_them(model, spec, budget, kind, ahead, monkeypatch):  # noqa: F811
    init = PooledBatch.__init__

    def launching_ahead(self, *args):
        init(self, *args)
        self.lag = max(ahead, self.lag)  # as on a GPU

    monkeypatch.setattr(PooledBatch, "__init__", launching_ahead)
    edited = [
        request(model, spec, seed, 100 + 17 * seed, 6 + 3 * seed, budget, **options)
        for seed, options in enumerate([EACH[-1], {"frequency_penalty": -2.0}, {"repetition_penalty": 0.1}])
    ]
    others = [request(model, spec, seed, 100 + 17 * seed, 6 + 3 * seed, budget) for seed in range(3)]
    work = Scheduler(model, {255}, max_rows=2)  # rows are used again
    run(work, [each for pair in zip(edited, others, strict=True) for each in pair])
    assert kind in {type(batch) for batch in work.held.batches.values()}
    assert [one.answer.ids for one in others] == [alone(one) for one in others]
    assert [one.answer.ids for one in edited] == [plain_answer(one, {255}) for one in edited]
    assert all(one.answer.ids != other.answer.ids for one, other in zip(edited, others, strict=True))


@pytest.mark.parametrize(("spec", "budget", "kind"), BATCHES)
def test_a_seed_says_the_same_whatever_is_beside_it(model, spec, budget, kind):  # noqa: F811
    def sampled(*beside, seed=5):
        one = request(model, spec, 1, 117, 12, budget)
        one.how = Generation(12, temperature=1.3, seed=seed, min_p=0.02, **EACH[-1])
        run(Scheduler(model, set(), max_rows=3), [*beside, one])
        return one.answer.ids

    first = sampled()
    assert first == sampled(request(model, spec, 4, 90, 20, budget, temperature=1.0, presence_penalty=1.0))
    assert first == sampled(request(model, spec, 4, 90, 20, budget))
    assert first != sampled(seed=6)


def test_rows_without_options_take_the_models_likeliest_token(model, monkeypatch):  # noqa: F811
    """A decode step samples only where a row asks for it, and not after that row is free."""
    asked, sample = [], SamplingRows.sample
    monkeypatch.setattr(SamplingRows, "sample", lambda *args: asked.append(1) or sample(*args))
    edited = request(model, "snapkv", 0, 100, 3, frequency_penalty=1.0)
    run(Scheduler(model, set()), [edited, request(model, "snapkv", 1, 100, 9), request(model, "snapkv", 2, 100, 9)])
    assert len(asked) == 3 + 2  # the first tokens, and the two steps of the row that is edited


def test_what_ends_an_answer(model):  # noqa: F811
    """EOS, stop tokens and stop texts, before and after min_tokens."""
    free = request(model, "snapkv", 0, 100, 12)
    run(Scheduler(model, set()), [free])
    said = free.answer.ids
    second = next(token for token in said[1:] if token != said[0])
    where = said.index(second)

    def ended(eos, **how):
        one = request(model, "snapkv", 0, 100, 12, **how)
        run(Scheduler(model, eos), [one])
        return one.answer.ids, one.finish_reason

    assert ended({second}) == ended(set(), stop_token_ids=[second]) == (said[:where], "stop")
    assert ended({second}, ignore_eos=True) == (said, "length")
    assert ended({second}, ignore_eos=True, stop_token_ids=[second]) == (said[:where], "stop")
    for how in ({"stop_token_ids": [second]}, {}):
        answer, _ = ended({second}, min_tokens=where + 3, **how)
        assert len(answer) >= where + 3 and answer[:where] == said[:where] and second not in answer[: where + 3]


def test_a_stop_text_counts_after_min_tokens(model):  # noqa: F811
    digits = {"logit_bias": dict.fromkeys(DIGITS, 50)}
    free = request(model, "snapkv", 3, 100, 40, **digits)
    run(Scheduler(model, set()), [free])
    text = free.text
    stop, second = next((text[i], i) for i in range(1, len(text)) if text[i] in text[:i])
    first = text.index(stop)
    tokens = next(count for count in range(41) if stop in WORDS.decode(free.answer.ids[:count]))
    for least, cut in ((0, first), (tokens - 1, first), (tokens, second)):
        one = request(model, "snapkv", 3, 100, 40, stop=stop, min_tokens=least, **digits)
        run(Scheduler(model, set()), [one])
        assert one.text == "".join(one.deltas) == text[:cut] and one.finish_reason == "stop"


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.5}, {"min_p": float("nan")}, {"frequency_penalty": 2.1}, {"presence_penalty": "1"},
        {"repetition_penalty": 0}, {"min_tokens": -1}, {"min_tokens": 300}, {"logit_bias": {3: 101}},
        {"logit_bias": {-3: 1}}, {"logit_bias": {"a": 1}}, {"logit_bias": [3]}, {"stop_token_ids": [True]},
        {"stop_token_ids": 3}, {"ignore_eos": 1},
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_named(wrong):
    with pytest.raises(BadParameter, match=next(iter(wrong))):
        Generation(**wrong)


@pytest.mark.parametrize("wrong", [{"logit_bias": {258: 1}}, {"stop_token_ids": [258]}])
def test_tokens_that_the_model_does_not_have_are_named(model, wrong):  # noqa: F811
    with pytest.raises(BadParameter, match=f"{next(iter(wrong))} has token id 258; this model's are 0 to 257"):
        request(model, "snapkv", 0, 10, **wrong)
