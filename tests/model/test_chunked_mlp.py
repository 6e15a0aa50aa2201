"""Feed-forward parts in chunks of a prompt: the same numbers."""

import pytest
import torch
from families import build, prompt

from kvkeep.model import chunked_mlp


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


def test_an_error_inside_leaves_nothing_behind():
    model = build("llama", "eager")
    with pytest.raises(ZeroDivisionError), chunked_mlp.chunked_mlp(model):
        raise ZeroDivisionError
    assert not any("forward" in vars(part) for part in model.modules())
