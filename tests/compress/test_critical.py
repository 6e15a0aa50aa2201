"""+critical: half of the budget by score, the rest by what a token adds to the hidden states."""

import numpy as np
import pytest
import torch
from conftest import make_llama
from draws import HEADS, many, noise, single
from oracles import frontier
from transformers import DynamicCache

import kvkeep
from kvkeep.compress import critical
from kvkeep.compress.guard import Guard
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse
from kvkeep.errors import BadParameter, BadTensor, UnsupportedModel
from kvkeep.types import Observation

IDS = torch.randperm(128, generator=torch.Generator().manual_seed(5))[None]


def given(scores, guard, **how):
    """A method whose scores are these."""
    return Method("given", lambda seen, budget: single(scores), guard, rerank=critical.Critical(**how))


@many(80)
def test_what_is_kept(seed):
    rng = np.random.default_rng(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    n, dim, hidden = (int(rng.integers(low, high)) for low, high in ((2, 60), (1, 9), (1, 12)))
    q, k, v, wo = (noise(rng, *shape) for shape in ((heads, n, dim), *[(kv_heads, n, dim)] * 2, (heads, hidden, dim)))
    scores = rng.integers(0, 5, (kv_heads, n)) / 4 if seed % 2 else noise(rng, kv_heads, n) ** 2
    budget, sinks = int(rng.integers(1, n + 1)), int(rng.integers(0, 3))
    how = [{}, {"share": 0.3}, {"share": 0.0, "offset": 0.5}, {"share": 1.0}, {"offset": 0.0}][seed % 5]
    sinks = min(sinks, budget)
    forced = [list(range(sinks)) for _ in range(kv_heads)]
    oracle = {"share": how.get("share", 0.5), "epsilon": how.get("offset", 1e-4), "group": heads // kv_heads}
    want = frontier.critical(scores, forced, v, wo, budget, **oracle)
    method = given(scores, Guard(sinks), **how)
    kept = kvkeep.select(method, *map(single, (q, k, v)), budget, output_weight=single(wo)).tolist()
    weight = frontier.projected(v, wo, heads // kv_heads)
    for mine, theirs, row, norms in zip(kept, want, scores, weight, strict=True):
        second = (row + oracle["epsilon"]) * norms
        odd, worst = set(mine) ^ set(theirs), min(second[j] for j in theirs)
        assert len(mine) == len(theirs) and all(abs(second[j] - worst) < 1e-5 * abs(worst) for j in odd)


def test_norms_come_in_blocks(monkeypatch):
    torch.manual_seed(0)
    values, weight = torch.randn(2, 37, 8), torch.randn(6, 11, 8)
    whole = critical.output_norms(values, weight)
    want = (values[:, None] @ weight.view(2, 3, 11, 8).transpose(2, 3)).abs().sum(-1).mean(1)
    torch.testing.assert_close(whole, want)
    monkeypatch.setattr(critical, "BLOCK", 6 * 11 * 5)
    torch.testing.assert_close(critical.output_norms(values, weight), whole)


@pytest.mark.parametrize("storage", [None, "int8"])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_cache_knows_the_models_projection(parts, storage):
    """Also of a prompt in chunks that is evicted from at its end."""
    model = make_llama(num_hidden_layers=2).double()
    full = DynamicCache()
    model(IDS, past_key_values=full)
    observed, own = {}, parse("snapkv", window=8)

    def scorer(seen, budget):
        observed[seen.layer] = own.scorer(seen, budget)
        return observed[seen.layer]

    method = Method("recorded", scorer, own.guard, observation_window=8, rerank=critical.Critical())
    cache = kvkeep.Cache(model, method, 24, storage=storage)
    cache.defer_eviction(128)
    for ids in IDS.split(-(-128 // parts), 1):
        model(ids, past_key_values=cache)
    forced = [list(range(120, 128))] * 4
    for i, layer in enumerate(model.model.layers):
        wo = layer.self_attn.o_proj.weight.numpy().reshape(-1, 8, 8).transpose(1, 0, 2)
        want = frontier.critical(observed[i].numpy(), forced, full.layers[i].values[0].numpy(), wo, 24, group=2)
        alone = frontier.keep(frontier.force_all(observed[i].numpy(), forced[0]), full.layers[i].keys[0], 24)
        if storage and parts > 1:  # quantized before they are weighed
            assert sum(len(set(a) & set(b)) for a, b in zip(cache.kept(i)[0], want, strict=True)) >= 4 * 24 - 4
        else:
            assert cache.kept(i)[0] == want
        assert want != alone


@pytest.mark.parametrize("spec", ["snapkv+adakv+critical", "echo+shared+critical", "kvzip+critical", "h2o+critical"])
def test_every_head_is_sure_of_its_share(spec):
    model = make_llama()
    cache = kvkeep.Cache(model, spec, 30)
    model(IDS, past_key_values=cache)
    lengths = [len(head) for layer in range(4) for head in cache.kept(layer)[0]]
    guard = parse(spec).guard.size(30)
    assert sum(lengths) == 16 * 30 and min(lengths) >= guard + (30 - guard) // 2
    for token in range(5):
        assert model(IDS[:, token : token + 1], past_key_values=cache).logits.isfinite().all()


def test_layers_with_other_budgets_halve_their_own():
    """Old budgets would make favourites of all tokens of a small layer, and keep the latest of them."""
    torch.manual_seed(0)
    q, k, v, weight = (torch.randn(*shape) for shape in ((4, 80, 8), (2, 80, 8), (2, 80, 8), (4, 9, 8)))
    for layer, layers in ((0, 4), (3, 4)):
        how = {"window": 4, "layer": layer, "layers": layers, "output_weight": weight}
        kept = kvkeep.select("snapkv+pyramid+critical", q, k, v, 20, **how)
        budget = kept.lengths[0]
        positions = torch.arange(80).expand(2, -1)
        scores = parse("snapkv", window=4).scorer(
            Observation(q[:, -4:], k, v, positions, (80, 80), 80, 80, 8**-0.5), 20
        )
        forced = [list(range(76, 80))] * 2
        assert kept.tolist() == frontier.critical(scores.numpy(), forced, v.numpy(), weight.numpy(), budget, group=2)
        assert budget != 20


def test_values_may_be_of_another_size_than_keys():
    """Old: a weight of the keys' size was asked for, and did not fit the values."""
    q, k, v, weight = torch.randn(4, 60, 8), torch.randn(2, 60, 8), torch.randn(2, 60, 6), torch.randn(4, 9, 6)
    kept = kvkeep.select("snapkv+critical", q, k, v, 16, window=4, output_weight=weight)
    wide = [torch.nn.functional.pad(t, (0, 2)) for t in (v, weight)]  # zeros weigh nothing
    assert (
        kept.tolist() == kvkeep.select("snapkv+critical", q, k, wide[0], 16, window=4, output_weight=wide[1]).tolist()
    )
    with pytest.raises(BadTensor, match=r"output_weight has shape \(4, 9, 8\); pass \[4, hidden, 6\]"):
        kvkeep.select("snapkv+critical", q, k, v, 16, output_weight=wide[1])


def test_what_cannot_be_weighed_is_refused_by_name():
    alone = ["knorm", "kvkeep", "full", "quest", "streamingllm"]
    for spec in (*(f"{name}+critical" for name in alone), "snapkv+critical+blocks", "snapkv+critical+threshold"):
        with pytest.raises(BadParameter, match="cannot work"):
            parse(spec)
    with pytest.raises(BadParameter, match="share=1.5: use 0 to 1"):
        parse("snapkv+critical", share=1.5)
    with pytest.raises(BadParameter, match="offset=-1.0: use 0 or more"):
        parse("snapkv+critical", offset=-1.0)
    drawn = torch.randn(4, 60, 8), torch.randn(2, 60, 8), torch.randn(2, 60, 8)
    with pytest.raises(BadParameter, match="'snapkv.critical' weighs values by the output projection"):
        kvkeep.select("snapkv+critical", *drawn, 16)
    with pytest.raises(BadTensor, match=r"output_weight has shape \(4, 9\); pass \[4, hidden, 8\]"):
        kvkeep.select("snapkv+critical", *drawn, 16, output_weight=torch.randn(4, 9))
    model = make_llama()
    model.model.layers[0].self_attn.projection = model.model.layers[0].self_attn.o_proj
    del model.model.layers[0].self_attn.o_proj
    with pytest.raises(UnsupportedModel, match="output projection of layer 0"):
        kvkeep.Cache(model, "snapkv+critical", 16)
