"""Rotations are read off the model: rotating a cached key again equals rotating it afresh."""

from dataclasses import replace

import pytest
import torch
import transformers
from conftest import make_llama
from families import SIZES, build, prompt, randomised
from transformers import CohereConfig, CohereForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, SmolLM3Config
from transformers import SmolLM3ForCausalLM as SmolLM3

import kvkeep
from kvkeep.compress.parse import parse
from kvkeep.errors import UnsupportedModel
from kvkeep.model.rope import rotations

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512, "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0},
}  # fmt: skip


def rotated(model, keys, place, kind=None):
    """Keys [n, dim] freshly rotated by the model's own code."""
    import sys

    embedding = model.model.rotary_emb
    apply = sys.modules[type(embedding).__module__].apply_rotary_pos_emb
    where = torch.full((1, len(keys)), place)
    cos, sin = embedding(keys, where, *([kind] if kind else []))
    return apply(keys[None, None], keys[None, None], cos, sin)[1][0, 0]


@pytest.mark.core
@pytest.mark.trap(24)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("start, end", [(0, 1), (900, 3), (17, 2000), (512, 511)])
def test_turning_equals_fresh_rotation(rope, start, end):
    model = make_llama(rope_parameters=ROPES[rope])
    keys = torch.randn(5, 8)
    turned = rotations(model, [0])[0].rotate(rotated(model, keys, start), torch.full((5,), end - start))
    torch.testing.assert_close(turned, rotated(model, keys, end), atol=1e-5, rtol=0)


@pytest.mark.core
def test_interleaved_pairs_and_layers_of_two_kinds():
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=64)
    cohere = CohereForCausalLM(CohereConfig(**sizes, num_key_value_heads=2)).eval()
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_key_value_heads=2, head_dim=8, sliding_window=16)).eval()
    for model, layer, kind in ((cohere, 0, None), (gemma, 0, gemma.config.layer_types[0])):
        keys = torch.randn(3, 8)
        turned = rotations(model, [layer])[layer].rotate(rotated(model, keys, 30, kind), torch.tensor([-25] * 3))
        torch.testing.assert_close(turned, rotated(model, keys, 5, kind), atol=1e-5, rtol=0)
    assert rotations(cohere, [0])[0].interleaved


@pytest.mark.core
def test_layers_without_positions_are_not_turned():
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=64)
    model = SmolLM3(SmolLM3Config(**sizes, num_key_value_heads=2, pad_token_id=0)).eval()
    assert [rotation is None for rotation in rotations(model, [0, 1, 2, 3]).values()] == [False, False, False, True]
    cache = kvkeep.Cache(model, "streamingllm", 20)
    assert model(torch.arange(60)[None], past_key_values=cache).logits.isfinite().all()


@pytest.mark.core
def test_frequencies_that_change_with_length_are_refused():
    model = make_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(UnsupportedModel, match="'dynamic' RoPE"):
        kvkeep.Cache(model, "streamingllm", 20)
    kvkeep.Cache(model, "snapkv", 20)  # keys stay where they are: no objection


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDES = {
    "num_hidden_layers": 3,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


def sliding(kind, **settings):
    """Layers that rotate their keys in the window, and one without positions."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | SLIDES | settings)
    return randomised(getattr(transformers, f"{kind}ForCausalLM")(config))


@pytest.mark.core
@pytest.mark.parametrize("kind", ["Cohere2", "Exaone4", "ExaoneMoe", "Cohere2Moe"])
def test_layers_are_asked_whether_they_rotate(kind):
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model = sliding(kind, **EXPERTS if "Mo" in kind else {})
    assert [found is not None for found in rotations(model, [0, 1, 2]).values()] == [True, True, False]
    method, read = parse("streamingllm"), []
    for how in (method, replace(method, placement=None)):
        cache = kvkeep.Cache(model, how, 24)
        model(prompt(99), past_key_values=cache)
        read.append(model(prompt(1, seed=1), past_key_values=cache).logits)
    assert torch.equal(*read), "without positions there is nowhere to be moved"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_that_hardly_turn_do_not_hide_the_others(dtype):
    model = build("qwen2").to(dtype).train()
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[7::8] = 500.0  # of a slow channel, as Qwen2.5's are
    assert None not in rotations(model, [0, 1]).values()
    assert all(module.training for module in model.modules()), "left as it was found"
