"""State belongs to the cache: conversations on one model, and stock use of it, do not meet."""

from __future__ import annotations

import threading

import pytest
import torch
from masked_reference import BACKENDS, EVERY, build, kept, logits, prefilled, tokens
from torch import Tensor
from transformers import DynamicCache

import kvkeep


def steps(model, cache, seed: int):
    """A conversation in pieces, yielding the logits of each."""
    for n in (45, 1, 1, 20, 1):
        yield logits(model, tokens(n, seed + n), cache)


@pytest.mark.core
@pytest.mark.trap(19)
def test_second_and_third_call_compress_like_the_first(model):
    """New caches on the same model, and one cache after reset(), do what the first did."""
    first = prefilled(model, "snapkv+adakv")
    want, answer = kept(first), logits(model, tokens(3), first)
    for _ in range(2):
        cache = prefilled(model, "snapkv+adakv")
        assert kept(cache) == want and torch.equal(logits(model, tokens(3), cache), answer)
    first.reset()
    logits(model, tokens(90), first)
    assert kept(first) == want and torch.equal(logits(model, tokens(3), first), answer)


@pytest.mark.core
@pytest.mark.trap(19)
@pytest.mark.slow
def test_interleaved_conversations_equal_solo_runs(model):
    """Conversations with different methods take turns on one model; each is bit-equal to itself alone."""
    solo = [list(steps(model, kvkeep.Cache(model, name, budget=16), i)) for i, name in enumerate(EVERY)]
    caches = [kvkeep.Cache(model, name, budget=16) for name in EVERY]
    mixed = zip(*(steps(model, cache, i) for i, cache in enumerate(caches)), strict=True)
    for number, round_ in enumerate(mixed):
        for mine, want in zip(round_, solo, strict=True):
            assert torch.equal(mine, want[number])


@pytest.mark.core
@pytest.mark.trap(19)
def test_two_threads_equal_solo_runs(model):
    """Two conversations on one model in two threads do not meet."""
    names = ["snapkv+adakv", "intentkv+pyramid"]
    solo = [list(steps(model, kvkeep.Cache(model, name, budget=16), i)) for i, name in enumerate(names)]
    fresh, got, start = build(), [[], []], threading.Barrier(2)

    def talk(i: int) -> None:
        start.wait()
        for _ in range(5):
            got[i] = list(steps(fresh, kvkeep.Cache(fresh, names[i], budget=16), i))

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for mine, want in zip(got, solo, strict=True):
        assert len(mine) == len(want) and all(map(torch.equal, mine, want))


@pytest.mark.core
@pytest.mark.trap(19)
@pytest.mark.parametrize("impl", BACKENDS)
def test_stock_use_is_bit_equal_before_between_and_after(impl):
    """Without a cache of ours the model is the stock one: plain, padded, with its own caches, in generate."""
    model, ids = build(impl=impl), tokens(40, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0

    def stock() -> list[Tensor]:
        cache = DynamicCache(config=model.config)
        torch.manual_seed(3)
        with torch.no_grad():
            turns = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 30), (30, 31), (31, 40))]
        return [
            *turns, logits(model, ids), logits(model, ids, attention_mask=mask), logits(model, ids, use_cache=False),
            logits(model, ids, attention_mask=torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()),
            model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=True),
            model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, cache_implementation="static"),
        ]  # fmt: skip

    before = stock()
    cache = kvkeep.Cache(model, "snapkv+adakv", budget=12)
    assert all(map(torch.equal, stock(), before))
    logits(model, ids, cache, attention_mask=mask)
    assert all(map(torch.equal, stock(), before))
    logits(model, tokens(1, rows=2), cache)
    del cache
    assert all(map(torch.equal, stock(), before))
