"""Engines side by side say what each says alone."""

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING
from families import build, prompt

import kvkeep
from kvkeep.engine.independent_batch import IndependentBatch

TEXT = "".join(chr(97 + i * i % 23) + (". " if i % 17 == 0 else "") for i in range(260))
BUDGETS = (70, 120, 200)


@pytest.fixture(scope="module")
def chat():
    model = tiny_chat.model().double()  # a batch rounds otherwise than a row: too little to change what is fetched
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 20  # what is fetched matters
    return model, tiny_chat.tokenizer()


def same(one, other):
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def where(engine):
    return [engine.cache.kept(layer) for layer in engine.cache.compressed_layers]


@pytest.mark.core
@pytest.mark.parametrize("spec", [*EVICTING, *RETRIEVING])
def test_engines_side_by_side_say_what_each_says_alone(chat, spec):
    ids = chat[1](TEXT, return_tensors="pt").input_ids[0]
    alone = [kvkeep.Engine(*chat, spec, budget) for budget in BUDGETS] + [kvkeep.Engine(*chat, "full")]
    for number, engine in enumerate(alone):
        engine.prefill(ids[3 * number :])  # none has read as much as another
    several = IndependentBatch(alone[0].model, [engine.sequence.fork() for engine in alone])
    passes = torch.Generator().manual_seed(1)
    for number, tokens in enumerate([5, 1, 1, 1, 4, *[1] * 20]):
        new = torch.randint(3, 60, (len(alone), tokens), generator=passes)
        want = torch.stack([engine.extend(row) for engine, row in zip(alone, new, strict=True)])
        same(several.extend(new), want)
        assert [where(each) for each in several.sequences] == [where(engine) for engine in alone]
        assert [each.token_ids for each in several.sequences] == [engine.token_ids for engine in alone]
        if number == 7:  # somebody is done
            several.select_rows([3, 0, 2])
            alone = [alone[i] for i in (3, 0, 2)]


def test_layers_left_to_transformers_keep_engines_apart():
    model, ids = build("gemma3_text", "sdpa"), prompt(60)[0]
    alone = [kvkeep.Engine(model, tiny_chat.tokenizer(), "snapkv", budget) for budget in (16, 24)]
    for engine in alone:
        engine.prefill(ids)
    several = IndependentBatch(alone[0].model, [engine.sequence.fork() for engine in alone])
    assert not several.shares_forward
    for token in range(5, 12):
        new = torch.tensor([[token], [token + 1]])
        same(several.extend(new), torch.stack([engine.extend(row) for engine, row in zip(alone, new, strict=True)]))
