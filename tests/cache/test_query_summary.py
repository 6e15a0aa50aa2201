"""A summary of all of a prompt's queries: the same in one pass or several, saved, and without positions."""

import pytest
import torch
from conftest import make_llama

import kvkeep
from kvkeep.compress.scorers import expected_attention
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.rotation import Rotation

IDS = torch.randperm(128, generator=torch.Generator().manual_seed(9))[None, :100]
SPEC = "expected_attention"


def kept(cache):
    return [cache.kept(layer) for layer in cache.compressed_layers]


def summaries(cache):
    return cache.backend.query_buffer.queries


@pytest.mark.parametrize("spec", [SPEC, f"{SPEC}:epsilon=0.02+adakv", f"{SPEC}+shared"])
def test_moments_are_summed_over_passes(spec):
    model = make_llama().double()
    at_once, in_passes = (kvkeep.Cache(model, spec, 20) for _ in range(2))
    model(IDS, past_key_values=at_once)
    in_passes.defer_eviction(IDS.shape[1])
    for part in IDS.split([2, 40, 3, 55], 1):
        model(part, past_key_values=in_passes)
    for key, summary in summaries(at_once).items():
        torch.testing.assert_close(summaries(in_passes)[key], summary, rtol=1e-4, atol=1e-3)
        assert (summary[:, -1] == 96).all()  # the first four do not count
    assert kept(at_once) == kept(in_passes)


@pytest.mark.parametrize("first, n", [(0, 11), (0, 3), (2, 4), (7, 9)])
def test_moments_of_queries_at_position_0(first, n, monkeypatch):
    monkeypatch.setattr(expected_attention, "BLOCK", 4)  # a few queries at a time
    torch.manual_seed(n)
    queries, rotation = torch.randn(2, n, 6), Rotation(torch.tensor([1.0, 0.3, 0.01]), False)
    got = expected_attention.QueryMoments()(queries, first, rotation.rotate)
    want = torch.zeros(2, 8, 6, dtype=torch.float64)
    for head, i in torch.cartesian_prod(torch.arange(2), torch.arange(min(n, max(0, 4 - first)), n)).tolist():
        plain = rotation.rotate(queries[head, i : i + 1], torch.tensor([-first - i]))[0].double()
        want[head] += torch.cat([plain.outer(plain), plain[None], torch.ones(1, 6)])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_saved_one_goes_on_where_it_was(tmp_path):
    model = make_llama()
    cache = kvkeep.Cache(model, SPEC, 20)
    model(IDS[:, :60], past_key_values=cache)
    cache.save(tmp_path / "saved")
    loaded = kvkeep.Cache.load(tmp_path / "saved", model)
    for each in (cache, loaded):
        model(IDS[:, 60:], past_key_values=each)
    assert kept(cache) == kept(loaded)
    assert summaries(loaded)[0, 0][0, -1, 0] == 96


def test_decode_steps_count_where_they_are_evicted_from():
    model = make_llama()
    cache, idle = kvkeep.Cache(model, SPEC, 20, schedule=8), kvkeep.Cache(model, SPEC, 20)
    for each in (cache, idle):
        model(IDS[:, :60], past_key_values=each)
        for token in range(60, 80):
            model(IDS[:, token : token + 1], past_key_values=each)
    assert summaries(cache)[0, 0][0, -1, 0] == 76 and not summaries(idle)
    assert idle.report().kept_per_head == 40 and cache.report().kept_per_head < 28


def test_the_last_queries_are_not_there_to_compare_layers_by():
    with pytest.raises(BadParameter, match="cannot work: it needs the last queries"):
        kvkeep.Cache(make_llama(), f"{SPEC}+cake", 20)
