"""The most a prefill holds: the prompt and one layer of it, whatever the method does before it evicts."""

import pytest
import torch
from conftest import EVICTING, make_llama
from masked_reference import forward_rows

import kvkeep
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.cache.evictor import SPARE
from kvkeep.compress.parse import parse
from kvkeep.storage.history import History, HostPool, StreamedLayers

LAYERS, BUDGET, LENGTH = 8, 40, 120
COMPARING = ["snapkv+cake", "lookahead+cake", "kvzip:layerwise=true+cake", "snapkv+shared"]  # layers
SPECS = [*(name for name in EVICTING if name != "full"), *COMPARING]
IDS = torch.randint(2, 128, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def in_chunks(model, cache):
    cache.defer_eviction(LENGTH)
    for part in IDS.split([50, 40, 30], 1):
        model(part, past_key_values=cache)


WAYS = {
    "at once": lambda model, cache: model(IDS, past_key_values=cache),
    "in chunks": in_chunks,
    "rows": lambda model, cache: forward_rows(model, cache, [IDS[0], IDS[0, :90], IDS[0, 50:]], None),
}


@pytest.mark.parametrize("way", WAYS)
def test_of_every_method_the_peak_is_the_prompt_and_one_layer(way):
    model, over = make_llama(num_hidden_layers=LAYERS), {}
    for spec in SPECS:
        cache = kvkeep.Cache(model, spec, BUDGET)
        WAYS[way](model, cache)
        report, draft = cache.report(), parse(spec).draft
        rows, token = len(report.tokens_seen), report.full_bytes / sum(report.tokens_seen)
        layer = rows * LENGTH * token / LAYERS  # as the model has it, padding included
        most = report.full_bytes + max(layer, draft.steps * rows * token if draft else 0)
        assert report.bytes < 0.6 * report.full_bytes, spec
        if report.peak_bytes > most:
            over[spec] = report.peak_bytes / report.full_bytes
    assert not over


def over_a_history(model, spec, ids, history=True, storage=None):
    cache = kvkeep.Cache(model, spec, BUDGET, storage=storage)
    if history:
        cache.continue_from(History(HostPool(model.device)), [])
    cache.defer_eviction(ids.shape[1])
    for part in ids.split([150, 130, 70], 1):
        model(part, past_key_values=cache)
    return cache


def test_over_a_history_the_peak_is_what_is_kept_and_two_layers():
    """Passes after the prompt read one layer after the other from the host, and what is kept is the same."""
    model, n = make_llama(num_hidden_layers=LAYERS), 350
    ids = torch.randint(2, 128, (1, n), generator=torch.Generator().manual_seed(2))
    for spec in SPECS:
        method = parse(spec)
        if method.scores_own_tokens or method.placement:
            continue
        cache, held = over_a_history(model, spec, ids), over_a_history(model, spec, ids, history=False)
        assert [cache.kept(i) for i in range(LAYERS)] == [held.kept(i) for i in range(LAYERS)], spec
        report, layer = cache.report(), cache.report().full_bytes / LAYERS
        kept = SPARE * report.bytes if method.across_layers else report.bytes
        if method.draft:
            kept = LAYERS * layer * (method.draft.kept(BUDGET, n) + method.draft.steps) / n
        most = report.full_bytes + layer if method.layers.layer_weight else kept + 2 * layer
        assert report.bytes < report.peak_bytes <= most, spec
        assert report.host_bytes == report.full_bytes


@pytest.mark.parametrize("spec", ["kvzip", "kvkeep_context", "lookahead"])
@pytest.mark.parametrize("cut", ["pass", "layer"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_passes_over_a_history_that_were_cut_short_begin_again(spec, cut, storage, monkeypatch):
    model, calls = make_llama(num_hidden_layers=LAYERS, head_dim=16, vocab_size=258), []
    ids = torch.randint(2, 128, (1, 350), generator=torch.Generator().manual_seed(2))
    want = over_a_history(model, spec, ids, storage=storage)
    read = "part" if spec == "kvkeep_context" else "__getitem__"
    where = (EvictingBackend, "_evicted") if cut == "layer" else (StreamedLayers, read)
    own = getattr(*where)

    def fail(*args):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return own(*args)

    cache = kvkeep.Cache(model, spec, BUDGET, storage=storage)
    cache.continue_from(History(HostPool(model.device)), [])
    cache.defer_eviction(350)
    monkeypatch.setattr(*where, fail)
    with pytest.raises(KeyboardInterrupt):
        for part in ids.split([150, 130, 70], 1):
            model(part, past_key_values=cache)
    assert cache.seen == 350
    for each in (cache, want):
        model(IDS[:, :1], past_key_values=each)
    assert [cache.kept(i) for i in range(LAYERS)] == [want.kept(i) for i in range(LAYERS)]
    assert cache.nbytes == want.nbytes and cache.tracker.kept == want.tracker.kept


def test_the_peak_counts_what_stands_beside_the_layers(monkeypatch):
    """Seen from outside: what the layers hold whenever a layer of the kept tokens is made, and that layer."""
    model, seen, own = make_llama(num_hidden_layers=LAYERS), [], EvictingBackend._evicted

    def watched(backend, *selected):
        layer = own(backend, *selected)
        seen.append(sum(each.nbytes for each in backend.steps.store.values()) + layer.nbytes)
        return layer

    monkeypatch.setattr(EvictingBackend, "_evicted", watched)
    cache = kvkeep.Cache(model, "kvzip", BUDGET)
    model(IDS, past_key_values=cache)
    assert len(seen) == LAYERS and seen == sorted(seen, reverse=True)
    assert max(seen) <= cache.report().peak_bytes


USES = {
    "step": lambda cache, model: model(IDS[:, :1], past_key_values=cache),
    "turn": lambda cache, model: model(IDS[:, :30], past_key_values=cache),
    "report": lambda cache, model: cache.report().kept_per_head,
    "fork": lambda cache, model: model(IDS[:, :1], past_key_values=cache.fork()),
    "rows": lambda cache, model: cache.batch_repeat_interleave(2),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("spec", ["kvzip", "kvkeep_lookahead", "lookahead"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_an_eviction_cut_short_between_layers_goes_on(spec, use, storage, monkeypatch):
    model, own, calls = make_llama(num_hidden_layers=LAYERS, head_dim=16, vocab_size=258), EvictingBackend._evicted, []
    want = kvkeep.Cache(model, spec, BUDGET, storage=storage)
    model(IDS, past_key_values=want)

    def fail(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return own(*args)

    monkeypatch.setattr(EvictingBackend, "_evicted", fail)
    cache = kvkeep.Cache(model, spec, BUDGET, storage=storage)
    with pytest.raises(KeyboardInterrupt):
        model(IDS, past_key_values=cache)
    assert want.nbytes < cache.nbytes < want.report().full_bytes
    for each in (cache, want):
        USES[use](each, model)
    assert [cache.kept(i) for i in range(LAYERS)] == [want.kept(i) for i in range(LAYERS)]
    assert cache.nbytes == want.nbytes and cache.tracker.kept == want.tracker.kept


def test_a_second_turn_of_codes_keeps_what_its_tokens_are():
    """What is quantized already is copied where the same tokens stay together, and nowhere else."""
    model = make_llama(num_hidden_layers=3, head_dim=16)
    plain, codes = (kvkeep.Cache(model, "kvzip", 80, storage=storage) for storage in (None, "int8"))
    for part in (IDS, IDS[:, 20:]):
        for cache in (plain, codes):
            model(part, past_key_values=cache)
    for i in range(3):
        for exact, coded in zip(*(cache.backend.store[i].row(0) for cache in (plain, codes)), strict=True):
            both = [torch.isin(a.token_positions, b.token_positions) for a, b in ((exact, coded), (coded, exact))]
            assert both[0].sum() > 20
            torch.testing.assert_close(exact.values[both[0]], coded.values[both[1]], atol=0.05, rtol=0)
