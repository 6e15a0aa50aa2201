"""Fused operations: the model's numbers, its own parameters, and nothing left behind."""

import copy
import sys
import threading

import pytest
import torch
from families import FAMILIES, build, prompt

from kvkeep.model import fused, fused_layer


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(fused, "is_faster", lambda model: True)


def replaced(model):
    return {type(part).__name__ for part in model.modules() if "forward" in vars(part)}


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_the_same_numbers_and_nothing_left_behind(name):
    model, ids = build(name, "eager"), prompt(12)
    want, weights = model(ids).logits, {key: value.clone() for key, value in model.state_dict().items()}
    rope = {file: getattr(file, fused.ROPE) for file in fused._attention_files(model)}
    with fused.fused_ops(model):
        assert (model(ids).logits - want).abs().max() < 1e-4 * want.abs().max()
    assert not replaced(model) and all(getattr(file, fused.ROPE) is own for file, own in rope.items())
    assert (model(ids).logits - want).abs().max() < 1e-4 * want.abs().max()
    state = model.state_dict()
    assert state.keys() == weights.keys() and all(torch.equal(state[key], weights[key]) for key in weights)


@pytest.mark.parametrize(
    "name, kinds",
    {
        "llama": {"Linear", "LlamaRMSNorm", "LlamaMLP"},  # its output projection has a bias
        "granite": {"Linear", "GraniteRMSNorm", "GraniteMLP"},  # what is added to a sum is scaled
        "qwen2": {"Linear", "Qwen2RMSNorm", "Qwen2MLP", "Qwen2DecoderLayer"},
        "qwen3": {"Linear", "Qwen3RMSNorm", "Qwen3MLP", "Qwen3DecoderLayer"},
        "gemma3_text": {"Linear", "Gemma3RMSNorm", "Gemma3MLP"},
        "phi3": {"Phi3RMSNorm"},
        "cohere": {"Linear", "CohereMLP"},
    }.items(),
)
@torch.no_grad()
def test_what_is_replaced(name, kinds):
    model = build(name, "eager")
    with fused.fused_ops(model):
        assert replaced(model) == kinds
        file = sys.modules[type(model).__module__]
        ours = getattr(file, fused.ROPE).__module__ == fused.__name__
        assert ours == (name != "cohere")  # its pairs are neighbours


@torch.no_grad()
def test_weights_lie_one_after_the_other_and_stay_parameters(tmp_path):
    model = build("llama", "eager")
    layer = model.model.layers[0]
    with fused.fused_ops(model):
        pass
    q, k, v = (layer.self_attn.get_submodule(name) for name in fused.QKV)
    assert q.weight.data_ptr() + q.weight.nbytes == k.weight.data_ptr()
    assert k.bias.data_ptr() + k.bias.nbytes == v.bias.data_ptr()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(again(prompt(5)).logits, model(prompt(5)).logits)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(prompt(5)).logits, model(prompt(5)).logits)


@torch.no_grad()
def test_weights_that_change_later_count():
    model, ids = build("llama", "eager"), prompt(7)
    with fused.fused_ops(model):
        model(ids)
    layer = model.model.layers[0]
    layer.self_attn.k_proj.weight.mul_(2)  # in place: still packed
    layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data * 3  # elsewhere: no longer
    want = model(ids).logits
    with fused.fused_ops(model):
        assert (model(ids).logits - want).abs().max() < 1e-4 * want.abs().max()
    model.double()
    want = model(ids).logits
    with fused.fused_ops(model):
        assert (model(ids).logits - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@torch.no_grad()
def test_a_long_prompt_passes_the_mlp_in_chunks(name, monkeypatch):
    model, ids, seen = build(name, "eager"), prompt(37, 2), []
    want = model(ids).logits
    monkeypatch.setattr(fused_layer, "CHUNK_TOKENS", 16)
    down = model.model.layers[0].mlp.down_proj
    with fused.fused_ops(model):  # compares with the model's own
        pass
    down.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    with fused.fused_ops(model):
        assert (model(ids).logits - want).abs().max() < 1e-4 * want.abs().max()
    assert seen == [16, 16, 5]


@torch.no_grad()
def test_a_sum_in_place_in_chunks_and_the_hidden_states_a_hook_keeps(monkeypatch):
    model, ids, seen = build("qwen3", "eager"), prompt(37, 2), []
    monkeypatch.setattr(fused_layer, "CHUNK_TOKENS", 16)
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output))
    want = model(ids).logits
    with fused.fused_ops(model):
        assert (model(ids).logits - want).abs().max() < 1e-4 * want.abs().max()
        assert (seen[0] - seen[1]).abs().max() < 1e-4 * seen[0].abs().max()
        hook.remove()
        assert (model(ids).logits - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("name, last", [("qwen2", True), ("qwen3", True), ("llama", False)])
@pytest.mark.parametrize("shown", [1, 3, torch.tensor([4, 11]), 0], ids=str)
@torch.no_grad()
def test_the_last_mlp_runs_for_the_logits_that_are_shown(name, last, shown, monkeypatch):
    model, ids, seen = build(name, "eager"), prompt(12), []
    want, all_of = model(ids, logits_to_keep=shown).logits, fused.GatedMLP.add_to
    monkeypatch.setattr(
        fused.GatedMLP, "add_to", lambda mlp, total, x: seen.append(x.shape[1]) or all_of(mlp, total, x)
    )
    with fused.fused_ops(model, shown):
        got = model(ids, logits_to_keep=shown).logits
        with fused.fused_ops(model):  # a step between two layers, say
            assert model(ids).logits.shape[1] == 12
        assert (model(ids, logits_to_keep=shown).logits - want).abs().max() < 1e-4 * want.abs().max()
    assert got.shape == want.shape and (got - want).abs().max() < 1e-4 * want.abs().max()
    few = shown if isinstance(shown, int) and shown else 12 if isinstance(shown, int) else len(shown)
    assert seen == ([12, few, 12, 12, 12, few] if last else [])


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@torch.no_grad()
def test_hidden_states_that_are_asked_for_inside_are_those_of_each_layer(name):
    model, ids = build(name, "eager"), prompt(12)
    with fused.fused_ops(model):
        model(ids)  # in place
        states = model(ids, output_hidden_states=True).hidden_states
    for got, want in zip(states, model(ids, output_hidden_states=True).hidden_states, strict=True):
        assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_not_while_training():
    model = build("llama", "eager")
    with torch.enable_grad(), fused.fused_ops(model):
        assert not replaced(model)
    with torch.no_grad(), fused.fused_ops(model.train()):
        assert not replaced(model)


@torch.no_grad()
def test_a_replaced_forward_is_left_alone():
    model = build("llama", "eager")
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[1].mlp
    attention.k_proj.forward = attention.k_proj.forward
    mlp.forward = own = mlp.forward
    with fused.fused_ops(model):
        assert "forward" not in vars(attention.q_proj) and mlp.forward is own
    assert mlp.forward is own


@torch.no_grad()
def test_an_error_inside_and_threads_that_overlap_leave_nothing_behind():
    models, ids = [build("llama", "eager"), build("llama", "eager")], prompt(9)
    want, first_is_in, first_is_out = models[0](ids).logits, threading.Event(), threading.Event()
    rope = getattr(sys.modules[type(models[0]).__module__], fused.ROPE)

    def second():
        first_is_in.wait()
        with torch.no_grad(), fused.fused_ops(models[0]), fused.fused_ops(models[1]):
            first_is_out.wait()
            results.extend(model(ids).logits for model in models)

    results, thread = [], threading.Thread(target=second)
    thread.start()
    with pytest.raises(ZeroDivisionError), fused.fused_ops(models[0]):
        first_is_in.set()
        raise ZeroDivisionError
    first_is_out.set()
    thread.join()
    assert len(results) == 2 and all((got - want).abs().max() < 1e-4 * want.abs().max() for got in results)
    assert not any(map(replaced, models)) and getattr(sys.modules[type(models[0]).__module__], fused.ROPE) is rope
