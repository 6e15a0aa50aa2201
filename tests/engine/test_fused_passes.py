"""Passes that a method makes inside of a prefill have logits of their own, whatever that prefill shows."""

import pytest
import tiny_chat

import kvkeep
from kvkeep.model import fused

PROMPTS = ["".join(chr(97 + (i * i + n) % 23) for i in range(60 + 30 * n)) for n in range(3)]


@pytest.mark.parametrize("spec", ["kvzip", "lookahead", "snapkv"])
def test_packed_prompts_say_what_they_say_without_fused_layers(spec, monkeypatch):
    model, words = tiny_chat.sharp()
    model, seen, add_to = model.double(), [], fused.GatedMLP.add_to
    want = kvkeep.Engine(model, words, spec, 48).generate(PROMPTS, max_new_tokens=12)
    monkeypatch.setattr(fused, "is_faster", lambda model: True)
    monkeypatch.setattr(
        fused.GatedMLP, "add_to", lambda mlp, total, x: seen.append(x.shape[1]) or add_to(mlp, total, x)
    )
    engine = kvkeep.Engine(model, words, spec, 48)
    assert engine.generate(PROMPTS, max_new_tokens=12) == want
    assert len(PROMPTS) in seen  # the last layer's MLP, of the packed prompts' last tokens
    assert not {engine.length(prompt) for prompt in PROMPTS} & {*seen}  # none had to be prefilled again, by itself
