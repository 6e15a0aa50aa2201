"""Scorers see the model's own attention; attention that cannot be observed is refused by name."""

from __future__ import annotations

import pytest
import torch
from masked_reference import build, logits, spied, tokens
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

import kvkeep
from kvkeep.errors import UnsupportedModel
from kvkeep.model.hf_attention import enable


@pytest.mark.core
@pytest.mark.trap(6)
@pytest.mark.parametrize("impl", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"])
def test_other_attention_is_refused_by_name(impl, model):
    """Attention we cannot stand in for is named, and the model stays as it was."""
    model.config._attn_implementation_internal = impl
    for attempt in (enable, lambda m: kvkeep.Cache(m, "snapkv", budget=24)):
        with pytest.raises(UnsupportedModel, match=impl.replace("|", r"\|")):
            attempt(model)
    assert model.config._attn_implementation == impl


FAMILIES = {
    "qwen3 (q_norm)": (Qwen3ForCausalLM, Qwen3Config, {}),
    "granite (own scale)": (GraniteForCausalLM, GraniteConfig, {"attention_multiplier": 0.7}),
    "gemma2 (soft-capping, own scale)": (
        Gemma2ForCausalLM, Gemma2Config,
        {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5, "layer_types": ["full_attention"] * 3},
    ),
    "gpt-oss (sink logits)": (
        GptOssForCausalLM, GptOssConfig,
        {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 3},
    ),
    "smollm3 (layers without RoPE)": (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
}  # fmt: skip


@pytest.mark.core
@pytest.mark.trap(11)
@pytest.mark.parametrize("family", FAMILIES)
def test_scorers_see_the_models_own_attention(family):
    """The attention a scorer sees is the model's eager attention, norms, scales, caps and sinks included."""
    kind, config, changes = FAMILIES[family]
    model = build(kind, config, "eager", **changes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "sinks" in name:
                weight.add_(torch.randn_like(weight) * 0.5)
        ids = tokens(50)
        want = model(ids, output_attentions=True).attentions
    method, notes = spied()
    logits(model, ids, kvkeep.Cache(model, method, budget=20))
    assert [layer for layer, *_ in notes] == [0, 1, 2]
    for (_, _, got), theirs in zip(notes, want, strict=True):
        assert (got.flatten(0, 1) - theirs[0, :, -8:]).abs().max() < 1e-5


@pytest.mark.core
@pytest.mark.trap(12)
def test_latent_attention_is_refused_by_name():
    """MLA stores no keys to choose from."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = build(
        DeepseekV3ForCausalLM, DeepseekV3Config, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=16, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match="DeepseekV3ForCausalLM"):
        kvkeep.Cache(model, "snapkv", budget=10)
