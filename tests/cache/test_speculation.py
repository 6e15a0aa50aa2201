"""Assisted generation and prompt lookup: the tokens of plain generation with the same cache, or a refusal by name."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from conftest import EVICTING, RETRIEVING, make_llama
from families import build
from transformers import DynamicCache

import kvkeep
from kvkeep.errors import CacheMisuse

pytestmark = pytest.mark.skipif(
    not hasattr(DynamicCache, "activate_past_recording"), reason="this version of transformers says nothing before"
)
SPECS = [*EVICTING, "snapkv+adakv", "snapkv+pyramid", "snapkv+entropy", "kvkeep+prototypes", *RETRIEVING]
GREEDY = dict(max_new_tokens=36, do_sample=False)
IDS = torch.randint(0, 128, (1, 150), generator=torch.Generator().manual_seed(0))
REPETITIVE = IDS[:, :15].repeat(1, 10)
WAYS = {
    "itself": lambda model: (IDS, assisted_by(model)),  # without eviction every guess is right
    "stranger": lambda model: (IDS, assisted_by(make_llama(3, num_hidden_layers=1))),  # hardly any is
    "lookup": lambda model: (REPETITIVE, {"prompt_lookup_num_tokens": 4}),
}


def assisted_by(model):
    """Five guesses at a time, however unsure the assistant is."""
    model.generation_config.num_assistant_tokens = 5
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return {"assistant_model": model}


def both(model, spec, ids, how, storage=None, budget=60, **options):
    """Plain and assisted generation, each with a cache of its own. -> (tokens, cache) of both"""
    made = []
    for extra in ({}, how):
        cache = kvkeep.Cache(model, spec, budget, storage=storage)
        made.append((model.generate(ids, past_key_values=cache, **{**GREEDY, **options}, **extra), cache))
    return made


def assert_same(plain, assisted):
    """The same tokens, and the same tokens kept."""
    (want, before), (got, after) = plain, assisted
    assert got.tolist() == want.tolist()
    assert after.seen == before.seen == want.shape[1] - 1 and after.tracker.kept == before.tracker.kept
    assert all(after.kept(i) == before.kept(i) for i in before.compressed_layers)


@pytest.mark.parametrize(
    "spec, way",
    [(spec, way) for number, spec in enumerate(SPECS) for way in ("stranger", ("itself", "lookup")[number % 2])],
)
def test_the_same_tokens_or_a_refusal(spec, way, tiny):
    ids, how = WAYS[way](tiny)
    try:
        plain, assisted = both(tiny, spec, ids, how, max_new_tokens=14)
    except CacheMisuse as refused:
        method = kvkeep.methods[spec.split("+")[0]]
        decides = method.schedule.every or method.memory or method.retrieval or method.draft or "+recall" in spec
        assert decides or "cake" in spec or "entropy" in spec
        assert f"'{method.name}" in str(refused) and "use " in str(refused)
    else:
        assert_same(plain, assisted)


@pytest.mark.parametrize(
    "spec, storage, way",
    [
        ("full", "int8", "stranger"), ("kvkeep", "int8", "stranger"), ("snapkv", "int4", "stranger"),
        ("kvkeep", "int8", "itself"), ("snapkv", "int4", "lookup"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_groups_that_a_wrong_guess_completed_are_undone(spec, way, storage, tiny):
    """36 tokens complete a group of 32 in every head, some of them in a pass whose guesses are wrong."""
    ids, how = WAYS[way](tiny)
    assert_same(*both(tiny, spec, ids, how, storage))


@pytest.mark.parametrize("way", WAYS)
def test_how_many_guesses_are_right(way, tiny, monkeypatch):
    """What the ways above are for: many forward passes of the model, or few."""
    ids, how = WAYS[way](tiny)
    cache, passes = kvkeep.Cache(tiny, "full"), []
    begin = cache.backend.begin
    monkeypatch.setattr(cache.backend, "begin", lambda layout: (passes.append(layout), begin(layout)))
    tiny.generate(ids, past_key_values=cache, **GREEDY, **how)
    assert len(passes) == pytest.approx({"itself": 6, "stranger": 36, "lookup": 10}[way], rel=0.3)


@pytest.mark.parametrize("first, storage", [(1, None), (2, "int8"), (30, None), (30, "int8")])
def test_the_next_turn_is_the_same_too(first, storage, tiny):
    """A prompt after the answer is evicted from, scored by its own queries alone."""
    (out, plain), (_, assisted) = both(tiny, "snapkv", IDS, assisted_by(tiny), storage, max_new_tokens=first)
    out = torch.cat([out, IDS[:, :20]], 1)
    answers = [(tiny.generate(out, past_key_values=cache, **GREEDY), cache) for cache in (plain, assisted)]
    assert_same(*answers)
    with pytest.raises(CacheMisuse, match=r"this cache has seen \d+ tokens; make a new one, or leave assistant_model"):
        tiny.generate(answers[0][0], past_key_values=assisted, **GREEDY, assistant_model=tiny)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "qwen3", "phi3"])
def test_layers_left_to_transformers_are_cropped_with_ours(kind):
    """Prompt lookup: as an assistant, a model with sliding windows fails in transformers, whatever the cache."""
    model, ids = build(kind), REPETITIVE[:, :60] % 100 + 1
    assert_same(*both(model, "snapkv:window=8", ids, {"prompt_lookup_num_tokens": 3}, budget=24))


def test_padding_before_the_prompt(tiny):
    padded, mask = torch.cat([IDS[:, :7], IDS], 1), torch.ones(1, 157, dtype=torch.long)
    mask[:, :7] = 0
    (want, _), _ = both(tiny, "snapkv", IDS, {})
    cache = kvkeep.Cache(tiny, "snapkv", 60)
    got = tiny.generate(padded, attention_mask=mask, past_key_values=cache, assistant_model=tiny, **GREEDY)
    assert got[:, 7:].tolist() == want.tolist() and cache.tracker.seen == [185]


@pytest.mark.parametrize("way", WAYS)
def test_sampling_gives_the_stock_tokens_where_there_is_room(way, tiny):
    ids, how = WAYS[way](tiny)
    drawn = []
    for cache in (DynamicCache(config=tiny.config), kvkeep.Cache(tiny, "snapkv", 1000)):
        torch.manual_seed(5)
        drawn.append(tiny.generate(ids, past_key_values=cache, max_new_tokens=30, do_sample=True, top_k=20, **how))
    assert drawn[0].tolist() == drawn[1].tolist()


@pytest.mark.slow
def test_a_pass_of_guesses_that_is_cut_short_changes_nothing(tiny, monkeypatch):
    for storage in (None, "int8"):
        cache = kvkeep.Cache(tiny, "snapkv", 60, storage=storage)
        out = tiny.generate(IDS, past_key_values=cache, **GREEDY, assistant_model=tiny)
        want = tiny(out[:, -1:], past_key_values=cache.fork()).logits
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(tiny.model.layers[2].mlp, "forward", lambda x: 1 / 0)
            tiny(torch.cat([out[:, -1:], IDS], 1), past_key_values=cache, logits_to_keep=151)
        assert tiny(out[:, -1:], past_key_values=cache).logits.equal(want)


def test_only_guesses_can_be_cropped(tiny):
    cache = kvkeep.Cache(tiny, "snapkv", 60)
    tiny.generate(IDS, past_key_values=cache, **GREEDY, assistant_model=tiny)
    for wrong in (-1, -3, 80):
        with pytest.raises(CacheMisuse, match="cannot be cropped"):
            cache.crop(wrong)


def test_nothing_stays_on_the_model(tiny):
    """The hook leaves with its cache; a copy or pickle of the model in between has one that does nothing."""
    cache = kvkeep.Cache(tiny, "snapkv", 60)
    want = tiny.generate(IDS, past_key_values=cache, **GREEDY, assistant_model=tiny)
    for twin in (copy.deepcopy(tiny), pickle.loads(pickle.dumps(tiny))):
        again = kvkeep.Cache(twin, "snapkv", 60)
        assert twin.generate(IDS, past_key_values=again, **GREEDY, prompt_lookup_num_tokens=3).equal(want)
    gc.disable()
    del cache
    gc.enable()
    assert not tiny._forward_pre_hooks
