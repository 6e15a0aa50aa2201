"""Chunks of several sequences in one forward pass are what each is alone."""

import pytest
import tiny_chat
import torch
from conftest import EVICTING, RETRIEVING
from families import build, prompt

import kvkeep
from kvkeep.engine.packed_forward import PackedForward

TEXT = "".join(chr(97 + i * i % 23) + (". " if i % 17 == 0 else "") for i in range(260))
BUDGETS = (70, 120, 200)


@pytest.fixture(scope="module")
def chat():
    return tiny_chat.retrieving()


def same(one, other):
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def where(engine):
    return [engine.cache.kept(layer) for layer in engine.cache.compressed_layers]


@pytest.mark.core
@pytest.mark.parametrize("spec", [*EVICTING, *RETRIEVING])
def test_chunks_of_several_sequences_are_what_each_is_alone(chat, spec):
    ids = chat[1](TEXT, return_tensors="pt").input_ids[0]
    alone = [kvkeep.Engine(*chat, spec, budget) for budget in BUDGETS] + [kvkeep.Engine(*chat, "full")]
    for number, engine in enumerate(alone):
        engine.prefill(ids[3 * number :])  # none has read as much as another
    several, forward = [engine.sequence.fork() for engine in alone], PackedForward(chat[0])
    passes = torch.Generator().manual_seed(1)
    for number, tokens in enumerate([5, 1, 1, 1, 4, *[1] * 8]):
        lengths = [tokens] * len(alone) if tokens == 1 else range(tokens, tokens + len(alone))
        new = [torch.randint(3, 60, (length,), generator=passes) for length in lengths]
        want = [engine.extend(row, keep=0) for engine, row in zip(alone, new, strict=True)]
        keep = [(1, len(row), 1 + len(row) // 2)[(number + each) % 3] for each, row in enumerate(new)]
        got = forward(list(zip(several, new, strict=True)), keep)
        for one, other, kept in zip(got, want, keep, strict=True):
            same(one, other[-kept:])
        assert [where(each) for each in several] == [where(engine) for engine in alone]
        assert [each.token_ids for each in several] == [engine.token_ids for engine in alone]
        if number == 7:  # somebody is done
            several, alone = ([all_of[i] for i in (3, 0, 2)] for all_of in (several, alone))


def test_layers_left_to_transformers_keep_engines_apart():
    model, ids = build("gemma3_text", "sdpa"), prompt(60)[0]
    alone = [kvkeep.Engine(model, tiny_chat.tokenizer(), "snapkv", budget) for budget in (16, 24)]
    for engine in alone:
        engine.prefill(ids)
    several, forward = [engine.sequence.fork() for engine in alone], PackedForward(model)
    assert not forward.shares_forward
    for token in range(5, 12):
        new = torch.tensor([[token], [token + 1]])
        got = forward(list(zip(several, new, strict=True)))
        same(torch.stack(got), torch.stack([engine.extend(row) for engine, row in zip(alone, new, strict=True)]))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_first_chunks_attend_to_themselves_alone(implementation):
    """An eager mask covers the whole pass; each sequence gets its own part."""
    model = build("qwen2", implementation)
    engines = [kvkeep.Engine(model, tiny_chat.tokenizer(), "snapkv", budget) for budget in (16, 24)]
    firsts = zip(engines, (0, 7), strict=True)
    chunks = [(engine.config.new_sequence(), prompt(60)[0, first:]) for engine, first in firsts]
    got = PackedForward(model)(chunks)
    want = [engine.prefill(ids)[None] for engine, (_, ids) in zip(engines, chunks, strict=True)]
    torch.testing.assert_close(torch.stack(got), torch.stack(want), atol=1e-4, rtol=1e-4)
    assert [each.cache.kept(0) for each, _ in chunks] == [engine.cache.kept(0) for engine in engines]
