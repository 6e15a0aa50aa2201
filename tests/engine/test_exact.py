"""Exact answers: guessed over what a method kept, and verified against the whole history."""

import math
import re
import time
import warnings
from collections import Counter
from unittest.mock import Mock

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING
from serving import wait_until
from talk import TALK, say

import kvkeep
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.compress.parse import parse
from kvkeep.compress.presets import MODIFIERS
from kvkeep.engine import exact
from kvkeep.engine.exact import Exact
from kvkeep.engine.history_store import HistoryStore
from kvkeep.engine.request import FEWEST_GUESSES, MOST_GUESSES, Agreement, State
from kvkeep.engine.sequence import Sequence
from kvkeep.errors import BadParameter, KvkeepError, SlowAnswerWarning, StoreFull

SPECS = [*EVICTING, *(f"{name}+{modifier}" for name in ("snapkv", "h2o") for modifier in MODIFIERS)]
PROMPTS = ["one two " * 9, "what is it? " * 12, "x" * 61]
ALIKE = {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.retrieving()


@pytest.fixture(scope="module")
def full(chat):
    return kvkeep.Engine(*chat, "full")


@pytest.fixture(autouse=True)
def slow_is_no_failure():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowAnswerWarning)
        yield


def engine(chat, method="snapkv", budget=24, **options):
    return kvkeep.Engine(*chat, method, budget, **options)


def can_be_exact(spec):
    try:
        method = parse(spec)
    except KvkeepError:
        return False
    return not (method.retrieval or method.placement or method.scores_own_tokens)


def asked(one, messages=None, **how):
    handle = one.submit(messages or say(TALK[0]), **(ALIKE | how))
    handle.result()
    return handle.request


@pytest.mark.core
@pytest.mark.parametrize("spec", [spec for spec in SPECS if can_be_exact(spec)])
@pytest.mark.parametrize("how", [{}, {"temperature": 1.5, "seed": 3, "top_k": 40}], ids=["greedy", "sampled"])
def test_exact_answers_are_those_of_the_whole_model(chat, full, spec, how):
    """Token for token, though few tokens of the prompt are kept."""
    request = asked(one := engine(chat, spec), exact=True, **how)
    assert request.answer.ids == asked(full, **how).answer.ids and request.finish_reason == "length"
    if parse(spec).scorer is None:
        return
    assert request.kept_tokens < 40 and request.agreement.passes > 0
    guessed = asked(one, **how).answer.ids
    assert guessed != request.answer.ids or request.agreement.right == request.agreement.guessed


@pytest.mark.parametrize("spec", [*RETRIEVING, "intelllm", "streamingllm", "echo", "keep_prompt_random"])
def test_methods_that_cannot_be_exact_are_refused_by_name(chat, spec):
    with pytest.raises(BadParameter, match=re.escape(f"cannot work with '{parse(spec).name}'")):
        engine(chat, spec, 64).generate("some text", exact=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"history": None}, "history='host'"), ({"history_storage": "int8"}, "history_storage=")],
)
def test_engines_that_cannot_verify_say_so(chat, options, why):
    one = engine(chat, **options)
    for ask in (one.generate, one.submit, lambda text, **how: one.generate([text], **how)):
        with pytest.raises(BadParameter, match=why):
            ask("some text", exact=True)
    with pytest.raises(BadParameter, match=why):
        one.read("some text " * 9).ask("what?", exact=True)
    with pytest.raises(BadParameter, match="exact='yes': use True or False"):
        one.generate("some text", exact="yes")


def test_a_history_without_room_is_refused_by_name(chat):
    with pytest.raises(StoreFull, match="host_memory="):
        engine(chat, host_memory=1).generate(TALK[0], exact=True)


@pytest.mark.parametrize(
    "how",
    [
        {"max_new_tokens": 1}, {"max_new_tokens": 2}, {"max_new_tokens": 3}, {"stop": ["e", "qz"]}, {"stop": "!"},
        {"frequency_penalty": 0.7}, {"repetition_penalty": 1.3, "temperature": 0.8}, {"logit_bias": {5: 3.0}},
        {"ignore_eos": False, "min_tokens": 9, "stop_token_ids": list(range(90, 140))},
        {"stop_token_ids": list(range(60, 110))}, {"logprobs": 2}, {"logprobs": 1, "temperature": 1.0, "seed": 1},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("spec", ["snapkv", "kvkeep_lookahead"])
def test_options_mean_what_they_mean_to_full(chat, full, spec, how):
    exact, whole = asked(engine(chat, spec), exact=True, **how), asked(full, **how)
    assert (exact.answer.ids, exact.text, exact.finish_reason) == (whole.answer.ids, whole.text, whole.finish_reason)
    assert [each.token for each in exact.logprobs] == [each.token for each in whole.logprobs]
    for mine, theirs in zip(exact.logprobs, whole.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob) and [t for t, _ in mine.top] == [t for t, _ in theirs.top]


class Alternating:
    """A grammar that depends on what was said: high and low tokens in turns, then the end."""

    def __init__(self):
        self.said = []

    def allowed(self):
        allowed = torch.zeros(258, dtype=torch.bool)
        allowed[slice(130, 258) if len(self.said) % 2 else slice(2, 130)] = len(self.said) < 15
        return allowed

    def advance(self, token):
        self.said.append(token)


def test_a_constraint_holds_token_by_token(chat, full):
    how = {"constraint": Alternating, "ignore_eos": False}
    exact, whole = asked(engine(chat), exact=True, **how), asked(full, **how)
    assert exact.answer.ids == whole.answer.ids and len(exact.answer.ids) == 15 and exact.finish_reason == "stop"
    assert [token >= 130 for token in exact.answer.ids] == [bool(n % 2) for n in range(15)]


@pytest.mark.parametrize("options", [{"storage": "int8"}, {"schedule": "step"}, {"schedule": 4}, {"max_rows": 1}])
def test_engines_of_any_kind(chat, full, options):
    assert asked(engine(chat, **options), exact=True).answer.ids == asked(full).answer.ids


def test_every_way_to_ask(chat, full):
    one, talk, how = engine(chat, "kvkeep_lookahead"), [TALK[0]], {"exact": True, "max_new_tokens": 12}
    whole = {"max_new_tokens": 12}
    assert one.generate(PROMPTS[0], **how) == full.generate(PROMPTS[0], **whole)
    assert one.generate(PROMPTS, **how) == full.generate(PROMPTS, **whole)
    assert "".join(one.stream(TALK[1], question="why?", **how)) == full.generate(TALK[1], question="why?", **whole)
    for text in ("and then?", "who?"):
        answer = one.chat(say(*talk), **how)
        assert answer == full.chat(say(*talk), **whole)
        assert one.submit(say(*talk), **how).result() == full.submit(say(*talk), **whole).result()
        talk += [answer, text]
    texts = one.read(TALK[2]), full.read(TALK[2])
    assert texts[0].ask("who?", **how) == texts[1].ask("who?", **whole)
    assert texts[0].ask("where?", **how) == texts[1].ask("where?", **whole)
    assert texts[0].report().kept_per_head < 60


def test_texts_that_are_stored(chat, full):
    with engine(chat, prefix_cache=10**7) as one:
        id = one.pin(TALK[1])
        assert one.submit("who?", context=id, exact=True, **ALIKE).result() == full.read(TALK[1]).ask("who?", **ALIKE)
    with engine(chat, prefix_cache=10**7, history=None) as one, pytest.raises(BadParameter, match="history='host'"):
        one.submit("who?", context=one.pin(TALK[1]), exact=True)


def test_the_cache_of_an_exact_answer_has_it(chat, full):
    """The tokens that the last pass took back are gone."""
    one = engine(chat)
    text = one.generate(TALK[0], exact=True, max_new_tokens=20)
    asked = one.encode(TALK[0]).tolist()
    assert one.token_ids == [*asked, *one.answer.ids][: len(one.token_ids)] and len(one.token_ids) >= len(asked) + 19
    assert one.cache.seen == len(one.token_ids) and one.cache.kept(0)[0][0][-1] == len(one.token_ids) - 1
    assert one.sequence.history is None and text == full.generate(TALK[0], max_new_tokens=20)


def test_prompts_alone_are_stored_for_nobody(chat):
    one = engine(chat)
    one.generate(TALK[0], exact=True, max_new_tokens=4)
    assert not one.store.histories.blocks
    asked(one, exact=True, cache_prefix=False)
    assert not one.store.histories.blocks
    asked(one, exact=True)
    assert one.store.histories.blocks


@pytest.mark.parametrize("spec", ["snapkv", "kvkeep_lookahead", "snapkv+adakv"])
def test_many_at_once_beside_others(chat, full, spec):
    """Exact ones of different length share passes; those that are not exact answer as they do alone."""
    one, texts = engine(chat, spec, max_rows=3), [text[: 60 + 17 * n] for n, text in enumerate(TALK * 2)]
    alone = [asked(engine(chat, spec), say(text)).answer.ids for text in texts[1::2]]
    handles = [one.submit(say(text), exact=not n % 2, **ALIKE) for n, text in enumerate(texts)]
    for handle in handles:
        handle.result()
    assert [each.request.answer.ids for each in handles[1::2]] == alone
    for text, handle in zip(texts[::2], handles[::2], strict=True):
        assert handle.request.answer.ids == asked(full, say(text)).answer.ids
    held = one._driver.scheduler.held
    assert not (held.num_requests or held.guesses or held.verifying)


def test_a_thread_steps_until_an_answer_is_complete(chat):
    """Also while its guesses are complete and not verified yet, and no batch has a row of it."""
    one = engine(chat)
    handle = one.submit(say(TALK[0]), exact=True, **ALIKE)
    while one._driver.thread:
        time.sleep(0.01)
    assert handle.done and len(handle.request.answer.ids) == 24


@pytest.mark.parametrize("state", [State.GUESSING, State.VERIFYING])
def test_cancelled_answers_leave_nothing(chat, full, state):
    one = engine(chat)
    with one._driver.lock:  # only this thread steps: it sees every state
        request, other = one.submit(say(TALK[0]), exact=True, **ALIKE), one.submit(say(TALK[1]), exact=True, **ALIKE)
        scheduler = one._driver.scheduler
        while request.request.state is not state:
            assert not request.done
            one._driver.step()
        request.cancel()
    assert request.request.finish_reason == "cancelled" and request.request not in scheduler.held.taken
    assert other.result() == full.submit(say(TALK[1]), **ALIKE).result()
    scheduler.decoding.release_finished()
    assert not scheduler.held.taken and not scheduler.held.guesses
    assert not any(batch.requests for batch in scheduler.held.batches.values())


def test_guesses_without_memory_begin_again(chat, full):
    """Out of memory while several are guessed: what they are for begins again, and is answered all the same."""
    one, failed = engine(chat), []
    handles = [one.submit(say(text), exact=True, **ALIKE) for text in TALK[:3]]
    decoding = one._driver.scheduler.decoding
    launch = decoding.launch

    def fails(batch):
        if not failed and len(batch.requests) > 1:
            failed.append(True)
            return decoding._restart(batch, list(batch.requests), torch.OutOfMemoryError("no"))
        return launch(batch)

    decoding.launch = fails
    assert [each.result() for each in handles] == [asked(full, say(text)).text for text in TALK[:3]] and failed


def test_a_pass_that_fails_ends_its_answer_alone(chat, full, monkeypatch):
    one = engine(chat)
    bad, good = one.submit(say(TALK[0]), exact=True, **ALIKE), one.submit(say(TALK[1]), exact=True, **ALIKE)
    end = Exact.end

    def fails(self, request, logits):
        if request is bad.request:
            raise RuntimeError("broken")
        end(self, request, logits)

    monkeypatch.setattr(Exact, "end", fails)
    with pytest.raises(RuntimeError, match="broken"):
        bad.result()
    assert good.result() == full.submit(say(TALK[1]), **ALIKE).result()
    assert not one._driver.scheduler.held.taken


def test_nothing_is_verified_where_nothing_is_evicted(chat, full, monkeypatch):
    monkeypatch.setattr(Sequence, "accept", Mock(side_effect=AssertionError))
    request = asked(engine(chat, "snapkv", 4096), exact=True)
    assert request.answer.ids == asked(full).answer.ids and request.agreement == Agreement()
    with pytest.raises(AssertionError):  # codes are not what the model computed
        asked(engine(chat, "snapkv", 4096, storage="int8"), exact=True)


def test_full_is_exact_without_a_history(chat, full):
    for options in ({}, {"history": None}):
        request = asked(one := engine(chat, "full", **options), exact=True, cache_prefix=False)
        assert request.answer.ids == asked(full).answer.ids and not request.agreement.passes
        assert one.generate(TALK[0], exact=True, max_new_tokens=9) == full.generate(TALK[0], max_new_tokens=9)
        assert one.cache.report().host_bytes == 0
    with pytest.raises(BadParameter, match="history='host'"):
        engine(chat, "full", history=None, storage="int8").generate(TALK[0], exact=True)


def test_what_is_kept_is_selected_again_when_guesses_fall(chat, full, monkeypatch):
    """By the queries of the guesses, of all tokens before them; then the right ones are added."""
    seen, attend = [], EvictingBackend._attend_history

    def watched(self, index, past, call, layout):
        result = attend(self, index, past, call, layout)
        if any(layout.evict_now) and index == 0:
            seen.append((self, call.query[0], past.dense(0), layout.seen[0]))
            seen[-1] += ([head.tolist() for head in self.store[0].positions()[0]],)
        return result

    monkeypatch.setattr(EvictingBackend, "_attend_history", watched)
    one = engine(chat, "tova", 24)
    monkeypatch.setattr(Agreement, "falls", property(lambda self: self.passes > 0, lambda self, value: None))
    assert asked(one, exact=True).answer.ids == asked(full).answer.ids and len(seen) >= 2
    for _, query, tokens, n, kept in seen:
        keys = tokens.keys[:, :n].repeat_interleave(2, 0)
        weights = (query[:, -1:] @ keys.transpose(1, 2) / math.sqrt(8)).softmax(-1).mean((0, 1))
        for mine in kept:
            assert sorted(weights.topk(24).indices.tolist()) == mine


def test_fewer_are_guessed_while_they_are_wrong():
    agreement = Agreement()
    for guessed, right, following in ((8, 8, 16), (16, 16, 32), (32, 32, MOST_GUESSES), (32, 20, 32), (32, 15, 16)):
        agreement.adapt(guessed, right)
        assert agreement.next_guesses == following and agreement.falls == (right < guessed / 2)
    for _ in range(9):
        agreement.adapt(4, 0)
    assert agreement.next_guesses == FEWEST_GUESSES


def test_whoever_has_the_whole_answer_has_its_counts(chat):
    """A server reads them as soon as the last token has come: in the middle of a step."""
    one, seen = engine(chat), []
    handle = one.submit(say(TALK[0]), exact=True, **ALIKE)
    request = handle.request
    request.notify = lambda: seen.append((request.done, Agreement.total([request.agreement])))
    handle.result()
    known = Agreement.total([request.agreement])
    assert [counts for done, counts in seen if done] == [known] and known["passes"] > 1
    assert 1 + known["right"] + known["passes"] >= len(request.answer.ids) > 1 + known["right"]


def test_an_answer_that_did_not_pay_says_so(chat, monkeypatch):
    one = engine(chat, "knorm", 8)
    for paying, says in ((1, False), (9, True)):
        monkeypatch.setattr(exact, "PAYING", paying)
        with warnings.catch_warnings(record=True) as found, one._driver.lock:  # this thread steps, and is warned
            warnings.simplefilter("always")
            request = asked(one, exact=True, max_new_tokens=40)
        mine = [str(each.message) for each in found if each.category is SlowAnswerWarning]
        assert len(mine) == says and request.agreement.passes >= exact.MANY_PASSES
        assert all(f"{request.agreement.passes} times for 40 tokens: 'knorm'" in message for message in mine)


@pytest.mark.slow
def test_sampled_answers_have_the_distribution_of_full(chat):
    """Three tokens, each of the three likeliest: all 27 outcomes against their probabilities."""
    model, words = chat
    how = {"temperature": 1.4, "top_k": 3, "max_new_tokens": 3, "ignore_eos": True}
    one = engine(chat, "snapkv", 12)
    ids = one.config.encode(say(TALK[0]))
    expected = {}

    def grow(said, probability):
        if len(said) == 3:
            expected[said] = probability
            return
        with torch.inference_mode():
            logits = model(torch.cat([ids, torch.tensor(said, dtype=torch.int64)])[None]).logits[0, -1] / 1.4
        top = logits.topk(3)
        for token, p in zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True):
            grow((*said, token), probability * p)

    grow((), 1.0)
    n = 500
    handles = [one.submit(say(TALK[0]), seed=seed, exact=True, **how) for seed in range(n)]
    for handle in handles:
        handle.result()
    counts = Counter(tuple(handle.request.answer.ids) for handle in handles)
    assert set(counts) <= set(expected) and sum(expected.values()) == pytest.approx(1)
    chi = sum((counts[outcome] - n * p) ** 2 / (n * p) for outcome, p in expected.items())
    assert chi < 58  # the 99.97th percentile of 26 degrees of freedom
    assert any(handle.request.agreement.right < handle.request.agreement.guessed for handle in handles)


def test_histories_of_answers_are_given_back(chat):
    one = engine(chat)
    assert isinstance(one.store.histories, HistoryStore)
    one.submit(say(TALK[0]), exact=True, cache_prefix=False, **ALIKE).result()
    wait_until(lambda: one.store.histories.pool.in_use == 0)  # the engine's thread may be at the end of its step
