"""Keys made to stand elsewhere: turning a cached key equals rotating it there afresh, and attention follows."""

import pytest
import torch
from conftest import make_llama
from transformers import CohereConfig, CohereForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, SmolLM3Config
from transformers import SmolLM3ForCausalLM as SmolLM3

import kvkeep
from kvkeep.errors import BadParameter, UnsupportedModel
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


def places(cache, layer=0):
    return [head.rope_positions.tolist() for head in cache.backend.store[layer].row(0)]


@pytest.mark.core
def test_streaming_reads_as_if_the_dropped_had_never_been():
    """StreamingLLM's cache is contiguous: sinks and recent tokens at positions 0…B-1 give the same next logits."""
    model = make_llama(num_hidden_layers=1)
    ids = torch.randint(0, 128, (1, 80))
    cache = kvkeep.Cache(model, "streamingllm", 20)
    model(ids, past_key_values=cache)
    assert places(cache) == [list(range(60, 80))] * 4
    kept = torch.cat([ids[:, :4], ids[:, 64:], ids[:, :1]], 1)  # one layer: keys do not depend on what was dropped
    got = model(ids[:, :1], past_key_values=cache).logits[0, -1]
    torch.testing.assert_close(got, model(kept).logits[0, -1], atol=1e-4, rtol=0)
    model(ids[:, :30], past_key_values=cache)  # a second turn moves what was moved before
    assert places(cache) == [list(range(91, 111))] * 4


@pytest.mark.core
def test_a_gap_puts_the_far_past_behind_it():
    model = make_llama(num_hidden_layers=1, max_position_embeddings=200)
    ids = torch.randint(0, 128, (1, 90))
    cache = kvkeep.Cache(model, "intelllm", 20, gap=50)
    model(ids, past_key_values=cache)
    assert places(cache) == [[*range(30, 40), *range(80, 90)]] * 4
    plain = kvkeep.Cache(model, "intelllm", 100)
    model(ids, past_key_values=plain)
    assert places(plain) == [list(range(90))] * 4, "nothing was dropped, so nothing moves"
    with pytest.raises(BadParameter, match="gap=195"):
        model(ids, past_key_values=kvkeep.Cache(model, "intelllm", 20, gap=195))


@pytest.mark.core
def test_distances_are_capped_at_the_trained_window():
    model = make_llama(num_hidden_layers=1, max_position_embeddings=64)
    cache = kvkeep.Cache(model, "lm_infinite", 30)
    model(torch.randint(0, 128, (1, 100)), past_key_values=cache)
    assert places(cache) == [[36] * 10 + list(range(80, 100))] * 4


@pytest.mark.core
def test_moved_keys_survive_fork_and_file(tiny, tmp_path):
    ids = torch.randint(0, 128, (1, 90))
    cache = kvkeep.Cache(tiny, "streamingllm", 20)
    tiny(ids, past_key_values=cache)
    cache.save(tmp_path / "c")
    others = [cache.fork(), kvkeep.Cache.load(tmp_path / "c", tiny)]
    for more in (1, 30, 1):
        want = tiny(ids[:, :more], past_key_values=cache).logits
        assert all(torch.equal(tiny(ids[:, :more], past_key_values=other).logits, want) for other in others)
        assert all(places(other, 2) == places(cache, 2) for other in others)
