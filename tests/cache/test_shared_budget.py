"""One budget for the KV heads of all layers, in a cache: exact, bounded in memory, and as usable as any other."""

import pytest
import torch
from conftest import make_llama
from oracles.frontier import shared
from transformers import DynamicCache

import kvkeep
from kvkeep.cache import evictor
from kvkeep.compress.scorers.key_scores import KeyDiffScorer
from kvkeep.errors import BadParameter
from kvkeep.types import Observation

IDS = torch.randperm(128, generator=torch.Generator().manual_seed(5))[None]
LAYERS, HEADS, BUDGET = 4, 4, 12


def cached(model, spec="keydiff+shared", ids=IDS, budget=BUDGET, **how):
    cache = kvkeep.Cache(model, spec, budget, **how)
    logits = model(ids, past_key_values=cache).logits
    return cache, logits


def kept(cache, row=0):
    return [cache.kept(layer)[row] for layer in range(LAYERS)]


def expected(model, ids, budget, floor=0.0, sinks=0):
    """From the scores of all layers at once."""
    full, n = DynamicCache(), ids.shape[1]
    model(ids, past_key_values=full)
    scores = []
    for layer in full.layers:
        keys, values = layer.keys[0], layer.values[0]
        positions = torch.arange(n).expand(HEADS, -1)
        seen = Observation(keys[:, :0], keys, values, positions, (n,) * HEADS, n, n, 1.0)
        scores.append(KeyDiffScorer()(seen, budget).numpy())
    return shared(scores, [[list(range(sinks))] * HEADS] * LAYERS, budget, floor)


@pytest.mark.parametrize("spare", [1, 2, 1000])
@pytest.mark.parametrize(("spec", "floor", "sinks"), [("", 0.0, 0), (":floor=0.5", 0.5, 0), ("+sinks", 0.0, 4)])
def test_the_best_of_all_layers_are_kept(spec, floor, sinks, spare, monkeypatch):
    monkeypatch.setattr(evictor, "SPARE", spare)
    model = make_llama()
    cache, _ = cached(model, f"keydiff+shared{spec}")
    assert kept(cache) == expected(model, IDS, BUDGET, floor, sinks)
    assert cache.report().kept_per_head == BUDGET


def test_no_more_is_held_than_will_be_kept_and_one_layer(monkeypatch):
    monkeypatch.setattr(evictor, "SPARE", 1)
    model = make_llama(num_hidden_layers=12)
    report = cached(model)[0].report()
    layer = report.full_bytes / 12
    assert report.bytes + layer <= report.peak_bytes <= 2 * report.bytes + layer < report.full_bytes


def test_rows_do_not_compete_with_each_other():
    model = make_llama()
    both, short = IDS.repeat(2, 1), IDS[:, :90]
    mask = torch.ones_like(both)
    mask[1, :38] = 0
    both[1, 38:] = short
    cache = kvkeep.Cache(model, "random+shared", BUDGET)
    model(both, attention_mask=mask, past_key_values=cache)
    for row, ids in enumerate((IDS, short)):
        assert kept(cache, row) == kept(cached(model, "random+shared", ids)[0])


@pytest.mark.parametrize("storage", [None, "int8", "int4"])
def test_a_head_may_end_up_empty_and_decodes(storage, tmp_path):
    """Also saved and loaded, forked, and prefilled further: what is held competes with what is new."""
    model = make_llama(num_hidden_layers=LAYERS, head_dim=16)
    cache, _ = cached(model, "random+shared", budget=2, storage=storage)
    assert 0 in [len(head) for layer in kept(cache) for head in layer]
    cache.save(tmp_path / "saved")
    forks = [cache.fork(), kvkeep.Cache.load(tmp_path / "saved", model)]
    steps = [[model(IDS[:, t : t + 1], past_key_values=each).logits for t in range(40)] for each in (cache, *forks)]
    assert all(step.isfinite().all() for step in steps[0])
    for others in steps[1:]:
        torch.testing.assert_close(torch.cat(others), torch.cat(steps[0]), atol=1e-5, rtol=0)
    model(IDS[:, :30], past_key_values=cache)
    assert cache.report().kept_per_head == 2


def test_what_is_not_comparable_is_refused():
    for spec in ("knorm+shared", "streamingllm+shared", "pyramidkv+shared", "chunkkv+shared", "snapkv+shared+pyramid"):
        with pytest.raises(BadParameter, match="cannot work"):
            kvkeep.Cache(make_llama(), spec, BUDGET)
    with pytest.raises(BadParameter, match="floor=1.5: use 0 to 1"):
        kvkeep.Cache(make_llama(), "snapkv+shared", BUDGET, floor=1.5)


def test_one_layer_is_adakv_without_a_floor():
    torch.manual_seed(0)
    given = torch.randn(4, 60, 8), torch.randn(2, 60, 8), torch.randn(2, 60, 8)
    same = [kvkeep.select(spec, *given, 16, window=8).tolist() for spec in ("snapkv+shared", "snapkv+adakv:alpha=0.0")]
    assert same[0] == same[1]
