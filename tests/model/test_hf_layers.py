"""Our cache layers answer as transformers asks; sliding and linear layers are left alone."""

from __future__ import annotations

import pytest
import torch
from masked_reference import build, logits, prefilled, tokens
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM

import kvkeep
from kvkeep.errors import CacheMisuse


@pytest.mark.core
@pytest.mark.trap(2)
def test_cache_layers_answer_old_and_new_calls(model):
    """Mask sizes from a count or from positions; every way transformers has asked for a length."""
    cache = prefilled(model)
    layer = cache.layers[0]
    assert tuple(layer.get_mask_sizes(7)) == tuple(layer.get_mask_sizes(torch.arange(90, 97))) == (97, 0)
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1
    assert cache.get_seq_length() == cache.get_seq_length(1) == 90
    assert len(cache) == 3 and cache.is_initialized and not cache.is_compileable
    if hasattr(cache, "get_query_offset"):
        assert cache.get_query_offset() == 90
    keys = torch.zeros(1, 2, 1, 16)
    assert [t.shape for t in layer.update(keys, keys, {"cache_position": None})] == [keys.shape] * 2


@pytest.mark.core
@pytest.mark.trap(12)
def test_sliding_layers_are_left_alone():
    """Sliding-window layers keep their stock cache, are not counted, and cannot be asked what they kept."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = build(Gemma2ForCausalLM, Gemma2Config, "eager", sliding_window=16, layer_types=types)
    ids = tokens(70)
    plain = DynamicCache(config=model.config)
    want = torch.cat([logits(model, ids[:, :60], plain), logits(model, ids[:, 60:], plain)], 1)
    roomy = kvkeep.Cache(model, "snapkv", budget=100)
    got = torch.cat([logits(model, ids[:, :60], roomy), logits(model, ids[:, 60:], roomy)], 1)
    assert torch.equal(got[:, :60], want[:, :60]) and (got - want).abs().max() < 1e-5
    cache = prefilled(model, "snapkv+adakv", 20, ids)
    assert cache.compressed_layers == [1] and cache.report().layers == 1
    assert type(cache.layers[0]) is type(plain.layers[0])
    assert cache.nbytes == 20 * 2 * (16 + 16) * 4
    with pytest.raises(CacheMisuse, match="layer 0"):
        cache.kept(0)
    assert model.generate(ids, past_key_values=cache.fork(), max_new_tokens=3, do_sample=False).shape == (1, 73)


@pytest.mark.core
@pytest.mark.trap(12)
def test_linear_layers_are_left_alone():
    """A hybrid's linear-attention layers keep their own state and are not counted."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    model = build(
        Qwen3NextForCausalLM, Qwen3NextConfig, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    ids = tokens(40)
    stock = model.generate(ids, max_new_tokens=4, do_sample=False)
    roomy = kvkeep.Cache(model, "snapkv", budget=99)
    assert model.generate(ids, past_key_values=roomy, max_new_tokens=4, do_sample=False).equal(stock)
    cache = kvkeep.Cache(model, "snapkv", budget=16)
    logits(model, ids, cache)
    assert cache.compressed_layers == [1] and [len(head) for head in cache.kept(1)[0]] == [16, 16]
    assert logits(model, tokens(1), cache).isfinite().all()


def test_compiled_model_may_ask_for_mask_sizes(model):
    """Under torch.compile lengths become symbols as soon as they vary; our layers must bear that."""
    cache = kvkeep.Cache(model, "snapkv", budget=20)
    ask = torch.compile(lambda x: x + cache.layers[0].get_mask_sizes(x.shape[0])[0], backend="eager", dynamic=True)
    assert ask(torch.zeros(7)).tolist() == [7.0] * 7
