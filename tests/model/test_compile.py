"""Small operations compiled: the same numbers, and nothing left behind."""

import sys

import pytest
import torch
from families import build, prompt

from kvkeep.model import chunked_mlp, compile


@pytest.fixture
def eagerly(monkeypatch):
    """Compiled as far as Python goes: no C++ compiler needed, and fast."""
    compiled = []

    def compile_(function):
        compiled.append(function)
        return torch_compile(function, backend="eager")

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    compile._compiled.cache_clear()
    yield compiled
    compile._compiled.cache_clear()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt_oss"])
def test_the_same_numbers_and_nothing_left_behind(name, eagerly):
    model, ids = build(name, "eager"), prompt(12)
    before = [dict(vars(part)) for part in model.modules()]
    file = sys.modules[type(model).__module__]
    rotate = getattr(file, compile.ROPE, None)
    with torch.no_grad():
        want = model(ids).logits
        with compile.compiled_ops(model):
            inside = [part for part in model.modules() if "forward" in vars(part)]
            assert (model(ids).logits - want).abs().max() < 1e-5
    assert len(inside) >= 3 * model.config.num_hidden_layers  # two norms and a feed-forward part in every layer
    assert not any(hasattr(part, "layer_idx") for part in inside)  # never attention
    assert [set(vars(part)) for part in model.modules()] == [set(names) for names in before]
    assert getattr(file, compile.ROPE, None) is rotate
    assert len(eagerly) <= 4  # by kind, not by layer


@pytest.mark.parametrize("change", [compile.compiled_ops, chunked_mlp.chunked_mlp])
def test_an_error_inside_leaves_nothing_behind(change, eagerly):
    model = build("llama", "eager")
    with pytest.raises(ZeroDivisionError), change(model):
        raise ZeroDivisionError
    assert not any("forward" in vars(part) for part in model.modules())
