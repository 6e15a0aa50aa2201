"""Rows decoded together are rows decoded alone."""

import pytest
import torch
from conftest import EVICTING, make_llama
from families import build, prompt

import kvkeep
from kvkeep.engine import pooled_batch
from kvkeep.engine.pooled_batch import PooledBatch, bin_pack
from kvkeep.engine.shared_prefill import prefill_shared
from kvkeep.errors import CacheMisuse

SPECS = [*EVICTING, "snapkv+adakv", "snapkv+pyramid", "protokv:votes=softmax+adakv", "h2o+adakv"]


def kept(model, ids, spec, budget):
    cache = kvkeep.Cache(model, spec, budget, schedule="prompt")
    return cache, prefill_shared(model, ids, [cache])


@pytest.fixture(params=["slots", "stretches"])
def layout(request, monkeypatch):
    """Both on a processor; on a GPU only the ragged one is used."""
    monkeypatch.setattr(pooled_batch, "is_ragged", lambda model: request.param == "stretches")


@pytest.mark.core
@pytest.mark.parametrize("spec", SPECS)
def test_together_is_alone(tiny, spec, layout):
    ids, question, answer = torch.arange(150)[None] % 128, torch.tensor([3, 17, 90]), torch.tensor([5, 6])
    budgets = [24, 60, 33]
    caches = [kept(tiny, ids, spec, budget)[0] for budget in budgets]
    rows = PooledBatch(tiny, caches, room=5)
    got = rows.extend(question.expand(3, -1), keep=0)
    for each in answer:
        got = torch.cat([got, rows.extend(each.expand(3, 1))], 1)
    for row, cache in enumerate(caches):
        for place, token in enumerate(torch.cat([question, answer])):  # one at a time nothing competes
            want = tiny(token[None, None], past_key_values=cache, logits_to_keep=1).logits[0, 0]
            assert torch.allclose(got[row, place], want, atol=2e-5), (row, place)


def test_rows_that_are_done_leave(tiny, layout):
    ids = torch.arange(90)[None] % 128
    caches = [kept(tiny, ids, "snapkv+adakv", budget)[0] for budget in (70, 80, 85)]
    rows, fewer = (PooledBatch(tiny, caches, room=4) for _ in range(2))
    want = [rows.extend(torch.full((3, 1), token)) for token in (1, 2, 3)][-1]
    fewer.extend(torch.full((3, 1), 1))
    fewer.select_rows([2, 0])
    got = [fewer.extend(torch.full((2, 1), token)) for token in (2, 3)][-1]
    assert torch.allclose(got, want[[2, 0]], atol=1e-5)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "qwen2"])
def test_families_decode_together(name, layout):
    model, ids = build(name, "eager"), prompt(60)
    caches = [kept(model, ids, "snapkv:window=8", budget)[0] for budget in (16, 24)]
    got = PooledBatch(model, caches, room=3).extend(ids[:, :3].expand(2, -1), keep=0)
    for row, cache in enumerate(caches):
        for place in range(3):
            want = model(ids[:, place : place + 1], past_key_values=cache).logits[0, 0]
            assert torch.allclose(got[row, place], want, atol=1e-4)


def test_only_rows_of_one_text_and_only_so_much_room(tiny):
    one, other = (kept(tiny, torch.arange(n)[None], "snapkv:window=8", 20)[0] for n in (40, 41))
    with pytest.raises(CacheMisuse, match="the same number of tokens"):
        PooledBatch(tiny, [one, other], room=1)
    with pytest.raises(CacheMisuse, match="3 tokens were to be appended, but there is room for 2"):
        PooledBatch(tiny, [one], room=2).extend(torch.zeros(1, 3, dtype=torch.long))


def test_packs_waste_at_most_half():
    sizes = [64] * 18 + [128] * 18 + [1024] * 18 + [4096, 1, 512]
    found = bin_pack(sizes, 2**20, ragged=False)
    assert sorted(row for pack in found for row in pack) == list(range(len(sizes)))
    for pack in found:
        assert max(sizes[row] for row in pack) * len(pack) <= 2 * sum(sizes[row] for row in pack)
    assert len(found) < 8 and bin_pack([], 9, False) == []
    assert bin_pack([9, 9, 9], 20, False) == [[0, 1], [2]] and bin_pack([9], 5, True) == [[0]]
    assert bin_pack([4, 900, 30], 1000, ragged=True) == [[1, 2, 0]]
    assert bin_pack([4, 900, 30], 930, ragged=True) == [[1, 2], [0]]


def test_what_many_rows_hold_is_never_shared(tiny):
    cache, _ = kept(make_llama(), torch.arange(50)[None], "snapkv:window=8", 20)
    before = cache.backend.store[0].flat.keys.clone()
    PooledBatch(cache.model, [cache, cache], room=2).extend(torch.zeros(2, 2, dtype=torch.long))
    assert cache.backend.store[0].flat.keys.equal(before) and cache.seen == 50
