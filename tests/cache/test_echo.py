"""echo in a cache: with the model's own queries and rotation, in passes of any size, and in decode."""

import numpy as np
import pytest
import torch
from conftest import make_llama
from oracles.frontier import scores_echo

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.compress.scorers.repetition import Repetition
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.errors import BadParameter

IDS = torch.randperm(128, generator=torch.Generator().manual_seed(7))[None, :100]
CHUNK = 16


@pytest.fixture
def observed(monkeypatch):
    """What the method's memory is given, layer by layer."""
    seen, score = [], Repetition.__call__

    def record(self, observation, budget):
        seen.append(observation)
        return score(self, observation, budget)

    monkeypatch.setattr(Repetition, "__call__", record)
    return seen


def state(cache, layer):
    return cache.backend.store[layer].dense(0).token_state[..., 0]


def kept(cache):
    return [cache.kept(layer) for layer in cache.compressed_layers]


def test_scores_are_those_of_the_models_queries(observed):
    model = make_llama()
    cache = kvkeep.Cache(model, "echo", 200, chunk=40)
    model(IDS, past_key_values=cache)
    frequencies = model.model.rotary_emb.inv_freq.numpy()
    for layer in (0, 3):
        q, k, v = (getattr(observed[layer], name).double().numpy() for name in ("queries", "keys", "values"))
        want = scores_echo(q, k, v, 1, inv_freq=frequencies, chunk=40, sinks=0)
        got = scores_echo(q, k, v, 4, inv_freq=frequencies, chunk=40)
        finite = np.isfinite(got)
        np.testing.assert_allclose(state(cache, layer).numpy()[finite], got[finite], rtol=2e-4, atol=1e-6)
        assert (np.abs(got[finite] - want[finite]) > 1e-6).any()  # the sinks do count


@pytest.mark.parametrize("spec", ["echo", "echo+shared", "echo+adakv", "echo+blocks", "echo:near=3"])
def test_a_prompt_in_whole_chunks_keeps_what_it_keeps_at_once(spec):
    model = make_llama().double()
    at_once, in_chunks = (kvkeep.Cache(model, spec, 20, chunk=CHUNK) for _ in range(2))
    model(IDS, past_key_values=at_once)
    in_chunks.defer_eviction(IDS.shape[1])
    for start, end in ((0, 32), (32, 48), (48, 96), (96, 100)):
        model(IDS[:, start:end], past_key_values=in_chunks)
    assert kept(at_once) == kept(in_chunks)
    assert at_once.report().kept_per_head == 20


def test_near_queries_alone_score():
    model = make_llama()
    near, all_queries = (kvkeep.Cache(model, spec, 20) for spec in ("echo:near=8+shared", "echo+shared"))
    for cache in (near, all_queries):
        model(IDS, past_key_values=cache)
    assert kept(near) != kept(all_queries)
    assert near.report().kept_per_head == 20


@pytest.mark.parametrize("parameter, value", [("near", -1), ("chunk", 0), ("gap", -1)])
def test_too_small_parameters_are_refused(parameter, value):
    with pytest.raises(BadParameter, match=f"{parameter}={value}: use a whole number"):
        parse("echo", **{parameter: value})


def test_passes_beside_answers_do_not_cut_a_chunk():
    model = make_llama()
    config = SequenceConfig(model, None, parse("echo", chunk=CHUNK), 20)
    sequence, sizes = config.new_sequence(), []
    assert sequence.defer_eviction(IDS.shape[1])
    while len(chunk := sequence.next_chunk(IDS[0], 20)):
        sizes.append(len(chunk))
        sequence.forward(chunk)
    assert sizes == [32, 32, 32, 4]
    whole = kvkeep.Cache(model, "echo", 20, chunk=CHUNK)
    model(IDS, past_key_values=whole)
    assert kept(sequence.cache) == kept(whole)


def test_what_is_held_competes_with_what_is_new():
    """Passes of any size, each evicted from; with heads of different lengths, too."""
    model = make_llama()
    for spec in ("echo", "echo+shared"):
        cache = kvkeep.Cache(model, spec, 20, chunk=CHUNK)
        for part in IDS.split(30, 1):
            model(part, past_key_values=cache)
            assert cache.report().kept_per_head == 20 and all(head[:4] == [0, 1, 2, 3] for head in cache.kept(1)[0])


def test_a_decode_step_scores_nothing_and_its_token_is_evicted_last(observed):
    model = make_llama()
    cache = kvkeep.Cache(model, "echo", 20, schedule=8)
    model(IDS, past_key_values=cache)
    calls = len(observed)
    for token in range(30):
        model(IDS[:, token : token + 1], past_key_values=cache)
        if token < 7:
            assert len(observed) == calls
    assert all(set(head) >= {0, 1, 2, 3, *range(114, 130)} for row in kept(cache) for head in row[0])


def test_rows_are_independent():
    model = make_llama()
    both, mask = IDS.repeat(2, 1), torch.ones(2, 100, dtype=torch.long)
    mask[1, :30], both[1, 30:] = 0, IDS[0, :70]
    cache = kvkeep.Cache(model, "echo+shared", 20)
    model(both, attention_mask=mask, past_key_values=cache)
    for row, ids in enumerate((IDS, IDS[:, :70])):
        alone = kvkeep.Cache(model, "echo+shared", 20)
        model(ids, past_key_values=alone)
        assert [layer[row] for layer in kept(cache)] == [layer[0] for layer in kept(alone)]
