"""Weights in 8-bit floats: the numbers of a model that was quantized by hand, and models that are refused unchanged."""

import copy
import threading
import weakref
from functools import partial

import numpy as np
import pytest
import tiny_chat
import torch
from conftest import make_llama
from families import FAMILIES, SIZES, build, prompt, randomised
from oracles import fp8 as oracle
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import kvkeep
from kvkeep.errors import BadParameter, KvkeepError, UnsupportedModel
from kvkeep.model import fp8_model, fused, fused_layer
from kvkeep.model.fp8_linear import Fp8Linear
from kvkeep.model.fp8_model import use_weights
from kvkeep.model.projections import output_weight

TEXT = "The first words of a text that goes on for a while, with some more words. " * 3
VALUES = np.array([-value for value in oracle.VALUES[:0:-1]] + oracle.VALUES)
MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2  # float32 holds them; no test relies on a tie


def rounded(x):
    """A row of numbers quantized to e4m3 with a scale of its own, and what they are then."""
    rows = x.double().numpy()
    scale = np.abs(rows).max(-1, keepdims=True).clip(oracle.LARGEST * 2.0**-100) / oracle.LARGEST
    scale = scale.astype(np.float32).astype(np.float64)
    return torch.tensor(VALUES[np.searchsorted(MIDDLES, rows / scale)] * scale).to(x.dtype)


def by_hand(model):
    """A copy whose decoder layers have quantized weights and quantize their inputs, in the model's dtype."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        for linear in layer.modules():
            if isinstance(linear, nn.Linear) and not any(size % 16 for size in linear.weight.shape):
                linear.weight.data = rounded(linear.weight.data)
                linear.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
    return model


def linear_kinds(model):
    return {type(each).__name__ for each in model.modules() if isinstance(each, nn.Linear | Fp8Linear)}


def qwen3(**changes):
    """A model all of whose layers fit, and can be fused."""
    torch.manual_seed(0)
    config = Qwen3Config(**{**SIZES, "hidden_size": 64, "intermediate_size": 80, "head_dim": 16, **changes})
    return randomised(Qwen3ForCausalLM(config))


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.setattr(fused, "is_faster", lambda model: True)


def close(got, want, most=1e-4):
    return (got - want).abs().max() <= most * want.abs().max()


@pytest.mark.parametrize("make", [qwen3, make_llama, partial(build, "llama"), partial(build, "gemma3_text")])
def test_the_numbers_are_those_of_a_model_that_was_quantized_by_hand(make):
    """But for a token that has a number at a tie, where a rounding of float32 decides."""
    model, ids = make().double(), prompt(40)
    want, whole = by_hand(model)(ids).logits, model(ids).logits
    use_weights(model, "fp8")
    off, was_off = ((each - want).abs().amax(-1) / want.abs().max() for each in (model(ids).logits, whole))
    assert (off < 1e-4).double().mean() > 0.9 and off.max() < 0.1 and (was_off > 1e-3).all() and was_off.max() < 0.5


def test_an_engine_answers_as_that_model_does():
    model, words = tiny_chat.sharp()
    twin = by_hand(model)
    ours, theirs = kvkeep.Engine(model, words, "snapkv", 32, weights="fp8"), kvkeep.Engine(twin, words, "snapkv", 32)
    assert ours.model is model and linear_kinds(model) == {"Linear", "Fp8Linear"}
    for prompt_ in (TEXT, TEXT[::-1], "short"):
        assert ours.generate(prompt_, max_new_tokens=24) == theirs.generate(prompt_, max_new_tokens=24)
        assert ours.token_ids == theirs.token_ids and ours.cache.kept(1) == theirs.cache.kept(1)


@pytest.mark.parametrize("spec", ["snapkv+critical", "kvzip_plus"])
def test_methods_that_weigh_values_by_the_output_projection(spec):
    model, words = tiny_chat.sharp()
    twin = by_hand(model)
    want = [output_weight(twin, index) for index in range(2)]
    use_weights(model, "fp8")
    for index in range(2):
        torch.testing.assert_close(output_weight(model, index), want[index])
    kept = []
    for each in (model, twin):
        cache = kvkeep.Cache(each, spec, 24, tokenizer=words)
        each(prompt(90), past_key_values=cache)
        kept.append([cache.kept(layer) for layer in range(2)])
    assert kept[0] == kept[1]


def test_memory_falls_and_the_old_weights_are_gone():
    model = qwen3(num_hidden_layers=4, intermediate_size=256)
    before = model.get_memory_footprint()
    linear = [each for layer in model.model.layers for each in layer.modules() if isinstance(each, nn.Linear)]
    elements, outs = sum(each.weight.numel() for each in linear), sum(each.out_features for each in linear)
    old = [weakref.ref(each.weight) for each in linear]
    del linear
    kvkeep.Engine(model, tiny_chat.tokenizer(), "snapkv", 32, weights="fp8")
    assert before - model.get_memory_footprint() == 4 * elements - elements - 4 * outs > 0.5 * before
    assert len(old) == 28 and not any(each() is not None for each in old)


def test_weights_that_were_prepared_before_are_gone_too(everywhere):
    model, ids = qwen3(), prompt(9)
    with torch.no_grad(), fused.fused_ops(model):
        model(ids)
    old = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
    use_weights(model, "fp8")
    want = model(ids).logits
    with torch.no_grad(), fused.fused_ops(model):
        assert close(model(ids).logits, want)
    assert old() is None


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_fused_operations_change_nothing(name, everywhere):
    model, ids = build(name, "eager"), prompt(12)
    try:
        use_weights(model, "fp8")
    except UnsupportedModel as error:
        assert "no linear layer" in str(error)
        return
    want = model(ids).logits
    with fused.fused_ops(model):
        assert close(model(ids).logits, want)
    assert not {type(part).__name__ for part in model.modules() if "forward" in vars(part)}
    assert torch.equal(model(ids).logits, want)


@pytest.mark.parametrize("biased", [False, True])
@torch.no_grad()
def test_layers_that_fit_are_fused_whole(biased, everywhere, monkeypatch):
    model, ids = qwen3(attention_bias=biased), prompt(37)
    use_weights(model, "fp8")
    want, seen, add = model(ids).logits, [], fused_layer.Fp8MLP.add_rows
    monkeypatch.setattr(
        fused_layer.Fp8MLP, "add_rows", lambda mlp, total, norm: seen.append(total.shape[1]) or add(mlp, total, norm)
    )
    monkeypatch.setattr(fused_layer, "CHUNK_TOKENS", 16)
    with fused.fused_ops(model, 3):
        kinds = {type(part).__name__ for part in model.modules() if "forward" in vars(part)}
        assert kinds == {"Fp8Linear", "Qwen3RMSNorm", "Qwen3MLP", "Qwen3DecoderLayer"}
        assert close(model(ids).logits[:, -3:], want[:, -3:]) and seen == [37, 3]
    with fused.fused_ops(model):
        assert close(model(ids).logits, want) and seen == [37, 3, 37, 37]
        assert close(model(ids[:, :1]).logits, want[:, :1])
        assert close(model(ids[:, :1].expand(3, 1)).logits, want[:, :1].expand(3, 1, -1))  # a decode step
        states = model(ids, output_hidden_states=True).hidden_states
    for got, own in zip(states, model(ids, output_hidden_states=True).hidden_states, strict=True):
        assert close(got, own)


@torch.no_grad()
def test_attention_that_reads_its_input_by_itself_gets_a_norm(everywhere):
    """What queries, keys and values do not read must not be the sum before the norm."""

    class Peeking(type(qwen3().model.layers[0].self_attn)):
        def forward(self, hidden_states, **how):
            result, weights = super().forward(hidden_states=hidden_states, **how)
            return self.o_proj(hidden_states.repeat(1, 1, 2)[..., :96]), weights

    model, ids = qwen3(), prompt(11)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Peeking
    use_weights(model, "fp8")
    want = model(ids).logits
    with fused.fused_ops(model):
        assert "Qwen3DecoderLayer" not in {type(part).__name__ for part in model.modules() if "forward" in vars(part)}
        assert close(model(ids).logits, want)


@torch.no_grad()
def test_threads_share_a_model(everywhere):
    model, results = qwen3(), {}
    use_weights(model, "fp8")
    prompts = [prompt(20 + n, seed=n) for n in range(4)]
    want = [model(ids).logits for ids in prompts]

    def run(n):
        with torch.no_grad(), fused.fused_ops(model):
            results[n] = [model(prompts[n]).logits for _ in range(8)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert all(close(got, want[n]) for n in range(4) for got in results[n]) and len(results) == 4


def test_a_model_that_is_moved_or_copied_keeps_its_numbers(everywhere):
    model, ids = qwen3(), prompt(10)
    use_weights(model, "fp8+head")
    want, layer = model(ids).logits, model.model.layers[0].mlp.up_proj
    with torch.no_grad(), fused.fused_ops(model):
        pass
    numbers = layer.weight.float().clone()
    twin = copy.deepcopy(model)
    model.double()
    assert layer.weight.dtype == torch.float8_e4m3fn and torch.equal(layer.weight.float(), numbers)
    assert layer.scale.dtype == torch.float32 and model.dtype == torch.float64
    assert close(model(ids).logits, want) and close(twin(ids).logits, want)
    with torch.no_grad(), fused.fused_ops(model):
        assert close(model(ids).logits, want)
    model.bfloat16()
    assert close(model(ids).logits, want, 0.1) and torch.equal(layer.weight.float(), numbers)


def test_engines_of_one_model_and_the_head():
    model, words = make_llama(vocab_size=272, num_hidden_layers=2), tiny_chat.tokenizer()
    said = [kvkeep.Engine(model, words, "snapkv", 32, weights=how).generate(TEXT) for how in ("fp8", "fp8", None)]
    assert said[0] == said[1] == said[2]
    layers = [each for each in model.modules() if isinstance(each, Fp8Linear)]
    assert type(model.lm_head) is nn.Linear and len(layers) == 14
    kvkeep.Engine(model, words, "snapkv", 32, weights="fp8+head").generate(TEXT)
    again = [each for each in model.modules() if isinstance(each, Fp8Linear)]
    assert type(model.lm_head) is Fp8Linear and all(a is b for a, b in zip(layers, again, strict=False))


class Adapter(nn.Module):
    """Wraps a layer as adapters do."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer

    def forward(self, x):
        return self.base_layer(x)


class Stored(nn.Linear):
    """Stores its weights in its own way, as quantized layers do."""


def adapted(model):
    model.model.layers[1].self_attn.o_proj = Adapter(model.model.layers[1].self_attn.o_proj)


def stored(model):
    model.model.layers[1].mlp.up_proj.__class__ = Stored


def offloaded(model):
    layer = model.model.layers[0].mlp.down_proj
    layer.forward = layer.forward


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def quantized(model):
    model.hf_quantizer = object()


@pytest.mark.parametrize(
    "weights, change, says",
    [
        ("fp8", adapted, "model.layers.1.self_attn.o_proj is no plain nn.Linear but a Adapter"),
        ("fp8", stored, "model.layers.1.mlp.up_proj is no plain nn.Linear but a Stored"),
        ("fp8", offloaded, "model.layers.0.mlp.down_proj is no plain nn.Linear but a Linear"),
        ("fp8", quantized, "quantized already"),
        ("fp8", nn.Module.train, "call model.eval"),
        ("fp8+head", tied, "use weights='fp8'"),
    ],
)
def test_a_model_that_cannot_be_changed_is_refused_and_stays(weights, change, says):
    model, words = tiny_chat.sharp()
    change(model)
    with pytest.raises(UnsupportedModel, match=says):
        kvkeep.Engine(model, words, "snapkv", 32, weights=weights)
    assert not any(isinstance(each, Fp8Linear) for each in model.modules())


def test_layers_whose_sizes_do_not_fit_stay():
    model = make_llama(intermediate_size=90)
    use_weights(model, "fp8")
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert type(model.model.layers[0].self_attn.q_proj) is Fp8Linear
    with pytest.raises(UnsupportedModel, match="no linear layer of this LlamaForCausalLM has sizes that 16 divides"):
        use_weights(make_llama(hidden_size=72, intermediate_size=90), "fp8")


def test_a_compiled_model_and_a_device_without_8_bit_floats(monkeypatch):
    model, words = tiny_chat.sharp()
    with pytest.raises(KvkeepError, match="OptimizedModule is not transformers' own model"):
        use_weights(torch.compile(model, backend="eager"), "fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    for device in ("cuda", "mps"):
        with pytest.raises(BadParameter, match=f"this model is on {device}; fp8 needs an NVIDIA GPU"):
            fp8_model._check_device(torch.device(device))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fp8_model._check_device(torch.device("cuda"))
    with pytest.raises(BadParameter, match="weights='fp9': use one of None, 'fp8', 'fp8\\+head'"):
        kvkeep.Engine(model, words, "snapkv", 32, weights="fp9")
