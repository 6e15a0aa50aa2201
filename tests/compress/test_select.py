"""Both ways to sort select the same tokens: rows one by one, and, as on a GPU, all rows and keys at once."""

import pytest
import torch
from conftest import make_llama

import kvkeep
from kvkeep.cache.evictor import Evictor
from kvkeep.compress.budget import heads
from kvkeep.kernels.torch import ranking
from kvkeep.kernels.torch.ranking import Units


def drawn(seed):
    """Scores with many ties, both zeros, infinities and padding; forced tokens; units of unequal size."""
    torch.manual_seed(seed)
    kv_heads, n = int(torch.randint(1, 5, ())), int(torch.randint(1, 60, ()))
    scores = (torch.randn(kv_heads, n) * 2).round() / 2 * torch.tensor([1.0, -1.0])[torch.randint(0, 2, (kv_heads, n))]
    scores[torch.rand(kv_heads, n) < 0.1] = float("inf")
    lengths = torch.randint(1, n + 1, (kv_heads,))
    tokens = torch.arange(n) < lengths[:, None]
    forced = (torch.rand(kv_heads, n) < 0.2) & tokens
    units = None
    if seed % 3:
        count = int(torch.randint(1, n + 1, ()))
        units = Units(torch.randint(0, count, (kv_heads, n)), torch.randn(kv_heads, count).round())
    return scores.masked_fill(~tokens, float("-inf")), forced, tokens, units, lengths.tolist()


@pytest.mark.parametrize("seed", range(200))
def test_all_rows_at_once_are_rows_one_by_one(seed, monkeypatch):
    scores, forced, tokens, units, lengths = drawn(seed)
    budget = int(torch.randint(1, max(lengths) + 1, ()))
    both = []
    for packs in (False, True):
        monkeypatch.setattr(ranking, "packs", lambda scores, packs=packs: packs)
        order = ranking.ranked(scores, forced, tokens, units)
        quota = heads.AdaptiveHeads(0.3)(scores, forced, lengths, budget, units)
        rank = ranking.inverse(order)
        assert quota == heads.AdaptiveHeads(0.3).counts(scores, forced, lengths, budget, units, rank).tolist()
        both.append((order.tolist(), quota, ranking.best_first(scores).tolist()))
    assert both[0] == both[1]
    assert torch.equal(ranking.inverse(order).gather(1, order), torch.arange(order.shape[1]).expand_as(order))


@pytest.mark.parametrize("rows", [ranking.ROWS, ranking.ROWS + 1, 9000])
def test_more_rows_than_numbers_fit_beside_the_keys(rows, monkeypatch):
    """Partitions of a long text, in all heads: `lagkv` has 8,000 of 131,000 tokens."""
    monkeypatch.setattr(ranking, "packs", lambda scores: True)
    scores = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0)).round()
    want = [sorted(range(3), key=lambda i: (-row[i], -i)) for row in scores.tolist()]
    assert ranking.best_first(scores).tolist() == want


def test_integers_are_in_the_order_of_the_scores():
    scores = torch.tensor([float("-inf"), -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 2.0, float("inf")])
    keys = ranking.sortable(scores).tolist()
    assert keys[4] == keys[5] and sorted(set(keys)) == [*keys[:4], *keys[5:]]
    assert keys[0] >= 0 and keys[-1] <= ranking.MOST


@pytest.mark.parametrize(
    "spec", ["kvkeep", "snapkv", "snapkv+adakv", "snapkv+adakv+blocks", "h2o", "pyramidkv", "chunkkv+adakv"]
)
def test_what_need_not_wait_for_the_device_keeps_the_same(spec, monkeypatch):
    """Lengths are asked for after the last layer."""
    model, ids = make_llama(vocab_size=512), torch.randint(0, 512, (1, 150), generator=torch.Generator().manual_seed(3))
    kept, can_wait = [], Evictor._can_wait
    for waits in (False, True):
        monkeypatch.setattr(Evictor, "_can_wait", lambda own, index, waits=waits: waits and can_wait(own, index))
        cache = kvkeep.Cache(model, spec, 32)
        for piece in (ids[:, :90], ids[:, 90:140], ids[:, 140:141], ids[:, 141:]):
            logits = model(piece, past_key_values=cache).logits
        report = cache.report()
        kept.append(([cache.kept(i) for i in range(4)], logits.tolist(), report.bytes, report.peak_bytes))
    assert kept[0] == kept[1]
