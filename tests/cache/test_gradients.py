"""With gradients on: a prompt's pass is the model's own, and what a cache keeps carries no graph."""

from collections import deque
from itertools import islice

import pytest
import torch
from conftest import RETRIEVING, make_llama
from families import build
from test_registry import IDS, LEGAL, make_cache, passes

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.compress.presets import METHODS

EVERY = [*METHODS, "protokv+recall", *(spec for spec in LEGAL if "+" in spec and parse(spec).memory)]


@pytest.fixture(autouse=True)
def gradients(no_gradients):
    with torch.enable_grad():
        yield


def tensors_in(thing, path, met):
    """Every tensor that can be reached from here without going through a model, and how."""
    if id(thing) in met or isinstance(thing, (torch.nn.Module, type)):
        return
    met[id(thing)] = thing  # held, so that no id comes twice
    if isinstance(thing, torch.Tensor):
        yield path, thing
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from tensors_in(value, f"{path}[{key!r}]", met)
    elif isinstance(thing, (list, tuple, set, deque)):
        for number, value in enumerate(thing):
            yield from tensors_in(value, f"{path}[{number}]", met)
    else:
        names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
        for name in names:
            yield from tensors_in(getattr(thing, name, None), f"{path}.{name}", met)


def graphs(cache):
    held = list(tensors_in(cache, "cache", {}))
    assert len(held) >= 4  # the walk found what is there
    return [path for path, tensor in held if tensor.requires_grad]


def states():
    """Each method as it evicts by itself, or from a buffer, which has its prompt's eviction, too; and with room."""
    for spec in EVERY:
        own = parse(spec).schedule.every or parse(spec).retrieval or "+recall" in spec
        yield spec, 32, None if own else 5
        if spec in METHODS:
            yield spec, 120, None
    yield from ((spec, 32, 5) for spec in ("h2o", "tova", "ahakv"))


@pytest.mark.core
@pytest.mark.parametrize("spec, budget, schedule", [*states()])
def test_nothing_a_cache_holds_carries_a_graph(spec, budget, schedule):
    model = make_llama(num_hidden_layers=2)
    cache, twin = (make_cache(model, spec, budget, schedule) for _ in range(2))
    for ids in islice(passes(), 9):  # the prompt, and more steps than the buffer holds
        logits = model(ids, past_key_values=cache).logits
        assert graphs(cache) == [] and logits.requires_grad
        with torch.no_grad():
            assert model(ids, past_key_values=twin).logits.equal(logits)
    assert [cache.kept(i) for i in range(2)] == [twin.kept(i) for i in range(2)]
    cache.fork()


@pytest.mark.parametrize("spec", ["h2o", "ahakv", "tova", "kvkeep", "snapkv+cake", "infllm", "quest"])
def test_extra_logits_that_are_parameters_stay_outside(spec):
    """gpt-oss's sinks are learned: whoever computes with them gets a graph."""
    model = build("gpt_oss").requires_grad_(True)
    cache = kvkeep.Cache(model, spec, 24)
    for ids in (IDS[:, :60] % 101, *(IDS[:, 60:64] % 101).split(1, 1)):
        model(ids, past_key_values=cache)
        ours = [path for path in graphs(cache) if not path.startswith("cache.layers")]  # sliding ones are transformers'
        assert ours == []


@pytest.mark.parametrize("spec", ["h2o", "snapkv"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_packed_tokens_carry_none_either(spec, storage):
    model = make_llama(num_hidden_layers=2)
    cache = kvkeep.Cache(model, spec, 48, schedule=32, storage=storage)
    for ids in (IDS[:, :60], *IDS[:, 60:100].split(1, 1)):
        model(ids, past_key_values=cache)
        assert graphs(cache) == []


def learned(model, ids, **how):
    """Logits, and the gradient of a loss over them by each parameter."""
    model.zero_grad()
    logits = model(ids, **how).logits
    torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    return logits.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.core
@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", [*METHODS, *RETRIEVING[-1:]])
def test_a_prompt_that_fits_has_the_gradients_of_the_stock_model(spec, kind):
    model = make_llama(num_hidden_layers=2)
    model.set_attn_implementation(kind)
    logits, wanted = learned(model, IDS[:, :60])
    for budget in (60, 100):
        got, found = learned(model, IDS[:, :60], past_key_values=make_cache(model, spec, budget))
        assert got.equal(logits)
        assert all(found[name] is not None and found[name].equal(wanted[name]) for name in wanted)
