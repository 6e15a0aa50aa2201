"""Calls that a cache refuses, and that leave it as it was; forks in place of crops, copies and pickles."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from masked_reference import BACKENDS, HARD, build, kept, logits, prefilled, tokens

import kvkeep
from kvkeep.errors import CacheMisuse, KvkeepError


@pytest.mark.core
@pytest.mark.trap(4)
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("follow", [1, 12])
def test_mask_of_ones_after_eviction_changes_nothing(impl, follow):
    """A 2-D mask over all tokens seen is not sliced by the compressed length."""
    model, question = build(impl=impl), tokens(follow, 3)
    cache = prefilled(model, "snapkv+adakv")
    twin = cache.fork()
    with_mask = logits(model, question, cache, attention_mask=torch.ones(1, 90 + follow, dtype=torch.long))
    assert torch.equal(with_mask, logits(model, question, twin))


@pytest.mark.core
@pytest.mark.trap(4)
def test_mask_of_the_compressed_length_is_refused(model):
    """A mask that counts kept tokens instead of seen ones is an error, not a guess."""
    cache = prefilled(model)
    with pytest.raises(CacheMisuse, match="91 columns"):
        logits(model, tokens(1), cache, attention_mask=torch.tensor([[0] + [1] * 24]))


@pytest.mark.core
@pytest.mark.trap(27)
@pytest.mark.parametrize("method", HARD)
def test_fork_instead_of_crop(method, model):
    """A compressed cache refuses crop() and names fork(); answers on forks leave the original bit-equal."""
    cache = prefilled(model, method)
    for arguments in ((80,), (-3,)):
        with pytest.raises(CacheMisuse, match="fork"):
            cache.crop(*arguments)
    want, nbytes = kept(cache), cache.nbytes
    answers = []
    for _ in range(2):
        fork = cache.fork()
        answers.append([logits(model, tokens(12, 8), fork), logits(model, tokens(1, 9), fork)])
        assert kept(cache) == want and cache.nbytes == nbytes and cache.get_seq_length() == 90
    assert all(map(torch.equal, *answers))
    assert torch.equal(logits(model, tokens(12, 8), cache), answers[0][0])


@pytest.mark.core
def test_refused_call_leaves_the_cache_as_it_was(model):
    """A mask or a batch of the wrong size is refused before anything happened: the conversation can go on."""
    cache = prefilled(model)
    want = logits(model, tokens(1), cache.fork())
    with pytest.raises(CacheMisuse):
        logits(model, tokens(1, rows=2), cache)
    with pytest.raises(CacheMisuse):
        logits(model, tokens(1), cache, attention_mask=torch.tensor([[0, 1, 1]]))
    assert torch.equal(logits(model, tokens(1), cache), want)


@pytest.mark.core
def test_another_models_cache_is_refused(model):
    """A cache serves the model it was made for; another one is refused, whether or not it has caches of its own."""
    for other in (build(seed=5), build(num_hidden_layers=2), build(num_hidden_layers=4)):
        for _ in range(2):
            with pytest.raises(KvkeepError):
                logits(other, tokens(30), kvkeep.Cache(model, "snapkv", budget=20))
            kvkeep.Cache(other, "snapkv", budget=20)


@pytest.mark.core
def test_deepcopy_forks_and_pickle_says_save(model):
    """deepcopy gives a fork that shares only the model; pickle, which would drag the model along, points to save()."""
    cache = prefilled(model)
    want, twin = kept(cache), copy.deepcopy(cache)
    logits(model, tokens(12), twin)
    assert kept(cache) == want and cache.get_seq_length() == 90 and twin.model is model
    with pytest.raises(CacheMisuse, match="save"):
        pickle.dumps(cache)
