"""A compiled model with a cache of ours says what the plain one says."""

import pytest
import torch
from conftest import make_llama

import kvkeep

IDS = torch.randperm(128, generator=torch.Generator().manual_seed(5))[None, :60]


def by_function(model, backend):
    return torch.compile(model, backend=backend)


def by_forward(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def in_place(model, backend):
    model.compile(backend=backend)
    return model


@pytest.fixture(autouse=True)
def forgotten():
    """What one test compiled is not another's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def written(model, cache, new=3):
    """A prompt and a few tokens after it, by hand, as text and as numbers."""
    logits = [model(IDS, past_key_values=cache).logits[:, -1]]
    for _ in range(new):
        logits.append(model(logits[-1].argmax(-1)[:, None], past_key_values=cache).logits[:, -1])
    return torch.cat(logits)


CASES = [  # each way, each kind of method, both backends: compiling takes its time
    (by_function, "aot_eager", "h2o"),
    (by_forward, "eager", "infllm"),
    (in_place, "aot_eager", "snapkv"),
]


@pytest.mark.parametrize("way, backend, spec", CASES)
def test_a_compiled_model_writes_what_the_plain_one_does(way, backend, spec):
    plain = make_llama(num_hidden_layers=2)
    wanted = kvkeep.Cache(plain, spec, 32)
    want = written(plain, wanted)
    model = way(make_llama(num_hidden_layers=2), backend)
    cache = kvkeep.Cache(model, spec, 32)
    torch.testing.assert_close(written(model, cache), want, atol=1e-5, rtol=0)
    assert [cache.kept(i) for i in range(2)] == [wanted.kept(i) for i in range(2)]


def test_a_compiled_model_generates_forks_and_loads(tmp_path):
    plain = make_llama(num_hidden_layers=2)
    how = {"max_new_tokens": 4, "do_sample": False}
    want = plain.generate(IDS, past_key_values=kvkeep.Cache(plain, "kvkeep", 32), **how)
    model = by_function(plain, "eager")
    cache = kvkeep.Cache(model, "kvkeep", 32)
    model(IDS[:, :-1], past_key_values=cache)
    cache.save(tmp_path / "saved")
    for twin in (cache.fork(), kvkeep.Cache.load(tmp_path / "saved", model)):
        last = model(IDS[:, -1:], past_key_values=twin).logits
        torch.testing.assert_close(last, model(IDS[:, -1:], past_key_values=cache.fork()).logits, atol=1e-5, rtol=0)
    assert model.generate(IDS, past_key_values=kvkeep.Cache(model, "kvkeep", 32), **how).equal(want)


def test_without_a_cache_of_ours_the_graph_is_whole():
    """Having been enabled must not cost a compiled model anything: one graph, no break."""
    model = make_llama(num_hidden_layers=2)
    want = model(IDS).logits
    kvkeep.Cache(model, "snapkv", 32)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(IDS, use_cache=False).logits, want, atol=1e-5, rtol=0)


def test_a_static_cache_generates_as_before():
    model = make_llama(num_hidden_layers=2)
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    want = model.generate(IDS, **how)
    kvkeep.Cache(model, "snapkv", 32)
    assert model.generate(IDS, **how).equal(want)
