"""Small operations compiled, or done slice by slice: the same numbers, and nothing left behind."""

import sys
from types import SimpleNamespace

import pytest
import torch
from families import build, prompt

from kvkeep.engine.cuda_graph import CudaGraphRunner
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


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "gemma3_text", "gpt_oss"])
def test_slices_of_a_prompt_are_the_prompt(name):
    model, ids = build(name, "eager"), prompt(37)
    with torch.no_grad():
        want = model(ids).logits
        with chunked_mlp.chunked_mlp(model, 8):
            assert (model(ids).logits - want).abs().max() < 1e-5
    assert not any("forward" in vars(part) for part in model.modules())


def test_a_slice_is_all_that_a_feed_forward_part_sees(monkeypatch):
    model, seen = build("llama", "eager"), []
    plain = type(model.model.layers[0].mlp).forward
    monkeypatch.setattr(
        type(model.model.layers[0].mlp), "forward", lambda self, x: seen.append(x.shape[1]) or plain(self, x)
    )
    with torch.no_grad(), chunked_mlp.chunked_mlp(model, 16):
        model(prompt(37))
        assert seen == [16, 16, 5] * model.config.num_hidden_layers
        seen.clear()
        model(prompt(16))
        assert seen == [16] * model.config.num_hidden_layers


@pytest.mark.parametrize("change", [compile.compiled_ops, chunked_mlp.chunked_mlp])
def test_an_error_inside_leaves_nothing_behind(change, eagerly):
    model = build("llama", "eager")
    with pytest.raises(ZeroDivisionError), change(model):
        raise ZeroDivisionError
    assert not any("forward" in vars(part) for part in model.modules())


def test_what_cannot_be_compiled_is_captured_without_and_what_cannot_be_captured_runs(monkeypatch, eagerly):
    model, tries = build("llama", "eager"), []

    def capture(self):
        tries.append(any("forward" in vars(part) for part in model.modules()))
        if tries[-1] or fails:
            raise RuntimeError("no compiler\nat all")
        self.graph, self.result = SimpleNamespace(replay=lambda: None), "replayed"

    monkeypatch.setattr(CudaGraphRunner, "_capture", capture)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    fails = False
    with pytest.warns(UserWarning, match="with its small operations compiled .no compiler.; it runs without"):
        assert CudaGraphRunner(lambda: "run", model)() == "replayed"
    assert tries == [True, False]
    fails = True
    with pytest.warns(UserWarning) as told:
        assert CudaGraphRunner(lambda: "run", model)() == "run"
    assert len(told) == 2 and "in a CUDA graph (no compiler); it runs without" in str(told[1].message)
