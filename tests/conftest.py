"""Fakes the whole suite shares: tiny random models, no download, made fresh for each test."""

import copy
import os
from functools import wraps
from zlib import crc32

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: threads that wait for busy cores spin
os.environ.setdefault("RAY_worker_niceness", "0")  # beside other tests, Ray's own 15 leaves its workers nearly no time


def __getattr__(name: str) -> list[str]:
    """Methods by kind, made when a test asks for them: a fault in one fails tests, not the import of this file."""
    if name not in ("EVICTING", "RETRIEVING"):
        raise AttributeError(name)
    retrieving = [each for each, method in kvkeep.methods.items() if method.retrieval]
    if name == "RETRIEVING":
        return [*retrieving, "protokv+recall"]
    return [each for each in kvkeep.methods if each not in retrieving]


def copied(make):
    """A model is made once; then come copies of it, and torch draws after each as it does after the first."""
    made = {}

    @wraps(make)
    def copies(*args, **changes):
        key = repr((args, sorted(changes.items()), torch.get_default_device()))
        if key not in made:
            made[key] = make(*args, **changes), torch.get_rng_state()
        model, state = made[key]
        torch.set_rng_state(state)
        return copy.deepcopy(model)

    return copies


@copied
def make_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=128, max_position_embeddings=4096
    )
    config = LlamaConfig(**{**sizes, "num_attention_heads": 8, "num_key_value_heads": 4, **changes})
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:  # random weights attend almost evenly; sharper heads make selections meaningful
        layer.self_attn.q_proj.weight.data *= 20
    return model


STARTED = {"ran", "served", "site", "installed", "driver", "ray", "execute"}  # processes and servers of a whole module


def pytest_addoption(parser):
    parser.addoption("--cases", type=int, help="run at most so many cases of a parametrised test")


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks next
def pytest_collection_modifyitems(config, items):
    """With `--dist loadgroup`, tests that share one of these run in the process that started it."""
    for item in items:
        if STARTED & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))
    if most := config.getoption("--cases"):
        thin_out(config, items, most)


def thin_out(config, items, most: int) -> None:
    """Leave at most so many cases of each test, spread over all of them; of seeds the first, four times as many.

    Options of a test often depend on its seed modulo some small number. Tests begin with different cases, so that a
    method that one of them leaves out comes in others.
    """
    tests = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = set()
    for name, cases in tests.items():
        seeded, step = "seed" in getattr(cases[0], "fixturenames", ()), -(-len(cases) // most)
        left.update(cases[: 4 * most] if seeded else cases[crc32(name.encode()) % step :: step])
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = [item for item in items if item in left]


@pytest.fixture
def tiny() -> LlamaForCausalLM:
    """Four random Llama layers with grouped heads."""
    return make_llama()


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A small random model, attentive enough that dropping tokens shows in its logits."""
    from masked_reference import build

    return build()


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield
