"""What an evicted cache answers: a stock model's attention, masked to what was kept."""

from __future__ import annotations

import pytest
import torch
from masked_reference import (
    BACKENDS,
    EVERY,
    HARD,
    PAIRED,
    build,
    kept,
    logits,
    prefilled,
    random_qkv,
    reference,
    row,
    tokens,
)
from torch import Tensor
from transformers import DynamicCache

import kvkeep
from kvkeep.compress.parse import parse


@pytest.mark.core
@pytest.mark.trap(1)
@pytest.mark.trap(3)
@pytest.mark.trap(5)
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("method", HARD)
@pytest.mark.parametrize("follow", [1, 12])
def test_evicted_cache_equals_masked_attention(method, impl, follow):
    """A follow-up over the evicted cache gives the logits of a stock model that may look only at what was kept."""
    model, ids = build(impl=impl), tokens(90 + follow)
    cache = prefilled(model, method, 24, ids[:, :90])
    what = row(cache)
    assert sum(len(head) for layer in what for head in layer) == 24 * 6
    got = logits(model, ids[:, 90:], cache)
    want = reference(model, ids, [(90, what)])[:, 90:]
    assert (got - want).abs().max() < 1e-4
    assert (got - logits(model, ids)[:, 90:]).abs().max() > 1e-2, "the eviction is invisible: the test shows nothing"


@pytest.mark.core
@pytest.mark.trap(1)
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("method", HARD)
def test_turns_equal_masked_attention(method, impl):
    """Prompt, three decoded tokens, a second turn, one more token: each sees what was kept by then."""
    model, ids = build(impl=impl), tokens(60 + 3 + 30 + 1)
    cache = prefilled(model, method, 20, ids[:, :60])
    stages = [(60, row(cache))]
    got = [logits(model, ids[:, i : i + 1], cache) for i in range(60, 63)]
    got.append(logits(model, ids[:, 63:93], cache))
    stages.append((93, row(cache)))
    assert sum(len(head) for layer in stages[1][1] for head in layer) <= 20 * 6
    got.append(logits(model, ids[:, 93:], cache))
    assert (torch.cat(got, 1) - reference(model, ids, stages)[:, 60:]).abs().max() < 1e-4


@pytest.mark.core
@pytest.mark.trap(3)
@pytest.mark.parametrize("impl", BACKENDS)
def test_layers_of_different_length_take_a_question(impl):
    """Layer-wise budgets really differ, and a 12-token question works on them; one mask would not fit them all."""
    model = build(impl=impl)
    cache = prefilled(model, "snapkv+pyramid", 24)
    lengths = [len(layer[0][0]) for layer in kept(cache)]
    assert len(set(lengths)) == 3 and sum(lengths) == 24 * 3 and lengths == sorted(lengths, reverse=True)
    assert logits(model, tokens(12, 5), cache).isfinite().all()


@pytest.mark.core
@pytest.mark.trap(5)
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("method", ["full", *HARD])
def test_many_tokens_at_once_equal_one_by_one(method, impl):
    """Twelve tokens over a past see the past and their own predecessors: a top-left causal mask would hide the past."""
    model, question = build(impl=impl), tokens(12, 3)
    cache = prefilled(model, method)
    twin = cache.fork()
    at_once = logits(model, question, cache)
    one_by_one = torch.cat([logits(model, question[:, i : i + 1], twin) for i in range(12)], 1)
    assert (at_once - one_by_one).abs().max() < 1e-4


@pytest.mark.core
@pytest.mark.trap(15)
def test_first_token_sees_everything_unless_the_question_comes_later(model):
    """A question inside the prompt sees all of it, bit-equal to the stock model; one after it sees what is left."""
    ids = tokens(90)
    want = logits(model, ids)
    whole = kvkeep.Cache(model, "snapkv", budget=8)
    assert torch.equal(logits(model, ids, whole), want)
    later = prefilled(model, "snapkv", 8, ids[:, :80])
    what = row(later)
    assert all(position < 80 for layer in what for head in layer for position in head)
    got = logits(model, ids[:, 80:], later)
    assert (got - want[:, 80:]).abs().max() > 1e-2
    other = prefilled(model, "snapkv", 8, ids[:, :80])
    assert row(other) == what, "the context's selection may not depend on the question"


@pytest.mark.core
@pytest.mark.trap(20)
@pytest.mark.parametrize("method", HARD)
def test_log_likelihood_of_continuations_feels_the_eviction(method, model):
    """Continuations scored from forks equal masked attention, not the full model, and leave each other alone."""
    context = tokens(80)
    cache = prefilled(model, method, 20, context)
    before = kept(cache)
    last = logits(model, context)[:, -1:]
    for seed in (5, 6, 7):
        choice = tokens(6, seed)
        whole = torch.cat([context, choice], 1)

        def likelihood(scores: Tensor, choice: Tensor = choice) -> float:
            return torch.cat([last, scores[:, :-1]], 1).log_softmax(-1).gather(2, choice[..., None]).sum().item()

        got = likelihood(logits(model, choice, cache.fork()))
        want = likelihood(reference(model, whole, [(80, row(cache))])[:, 80:])
        full = likelihood(logits(model, whole)[:, 80:])
        assert abs(got - want) < 1e-3 and abs(got - full) > 1e-2
    assert kept(cache) == before


@pytest.mark.core
@pytest.mark.trap(22)
@pytest.mark.parametrize("method", EVERY)
def test_kept_tokens_stay_in_order(method, model):
    """topk does not sort; we do: in selections, in storage, after decoding and after a second turn."""
    chosen = [] if parse(method).needs_passes else kvkeep.select(method, *random_qkv(), 30).tolist()
    for head in chosen:
        assert head == sorted(set(head))
    cache = prefilled(model, method, 30)
    for more in (1, 1, 25):
        logits(model, tokens(more, more), cache)
        assert all(head == sorted(set(head)) for layer in row(cache) for head in layer)
    held = cache.backend.store[0].row(0)[1].keys
    assert held.shape[0] == len(cache.kept(0)[0][1])


@pytest.mark.core
@pytest.mark.parametrize("method, impl", PAIRED)
def test_room_for_everything_changes_nothing(method, impl):
    """budget >= n: prefill bit-equal to the stock model, decoding within 1e-5, the same greedy tokens."""
    model, ids = build(impl=impl), tokens(50)
    stock, ours = DynamicCache(config=model.config), kvkeep.Cache(model, method, budget=200)
    assert torch.equal(logits(model, ids, ours), logits(model, ids, stock))
    for n in (1, 1, 9, 1):
        assert (logits(model, tokens(n, n), ours) - logits(model, tokens(n, n), stock)).abs().max() < 1e-5
    options, fresh = dict(max_new_tokens=8, do_sample=False), kvkeep.Cache(model, method, budget=200)
    assert model.generate(ids, past_key_values=fresh, **options).equal(model.generate(ids, **options))


def test_only_who_uses_log_sum_exps_is_given_them(model, monkeypatch):
    """The others' prefill takes the model's own attention, which is faster over long texts."""
    asked = []
    monkeypatch.setattr("kvkeep.cache.eviction.attend_with_lse", lambda call: asked.append(call))
    for method in ("compactor", "echo", "keep_prompt_random", "snapkv", "h2o"):
        assert not asked
        model(tokens(60), past_key_values=kvkeep.Cache(model, method, 30))
    assert len(asked) == model.config.num_hidden_layers
