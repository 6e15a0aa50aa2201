"""Selection kernels equal torch's functions, ties, both zeros, infinities and padding included."""

import pytest
import torch

from kvkeep.compress import pipeline
from kvkeep.kernels.torch import ranking
from kvkeep.kernels.triton import selection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(seed):
    torch.manual_seed(seed)
    kv_heads, n = int(torch.randint(1, 7, ())), [1, 17, 60, 700, 1024, 5000][seed % 6]
    scores = (torch.randn(kv_heads, n) * 2).round() / 2 * torch.tensor([1.0, -1.0])[torch.randint(0, 2, (kv_heads, n))]
    scores[torch.rand(kv_heads, n) < 0.1] = float("inf")
    lengths = torch.randint(1, n + 1, (kv_heads,)) if seed % 2 else torch.full((kv_heads,), n)
    tokens = torch.arange(n) < lengths[:, None]
    forced = (torch.rand(kv_heads, n) < 0.2) & tokens
    member = unit_scores = None
    if seed % 4:
        count = int(torch.randint(1, n + 1, ()))
        unit_scores = torch.randn(kv_heads, count).round()
        member = torch.randint(0, count, (n,)).expand(kv_heads, -1) if seed % 4 == 1 else None
        member = torch.randint(0, count, (kv_heads, n)) if member is None else member
    scores = scores.masked_fill(~tokens, float("-inf"))
    return [t if t is None else t.to(DEVICE) for t in (scores, forced, tokens, member, unit_scores, lengths)]


@pytest.mark.parametrize("seed", range(24))
def test_ranks_counts_and_places(seed):
    scores, forced, tokens, member, unit_scores, lengths = drawn(seed)
    rank = ranking.ranks(scores, forced, tokens, member, unit_scores)
    assert torch.equal(selection.ranks(scores, forced, tokens, member, unit_scores), rank)
    if seed % 2 == 0:
        assert torch.equal(selection.ranks(scores, forced, None, member, unit_scores), rank)
        assert torch.equal(ranking.ranks(scores, forced, None, member, unit_scores), rank)
    total = int(torch.randint(1, int(lengths.sum()) + 1, ()))
    floor = torch.randint(0, total // len(scores) + 1, (len(scores),)).double().to(DEVICE)
    how = scores, rank, floor, total, member, unit_scores
    counts = selection.top_counts(*how)
    assert torch.equal(counts, ranking.top_counts(*how)) and int(counts.sum()) == total
    places = selection.places_of(rank, counts, total)
    assert torch.equal(places, ranking.places_of(rank, counts, total))
    known = pipeline.PlacedSelection(places, counts).known()
    assert known.tolist() == [(row < count).nonzero()[:, 0].tolist() for row, count in zip(rank, counts, strict=True)]


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 8, 9])
def test_counts_of_many_layers_sorted_at_once(seed, monkeypatch):
    scores, forced, tokens, member, unit_scores, lengths = drawn(seed)
    orders = [torch.arange(scores.shape[1], device=DEVICE), *torch.randint(scores.shape[1], (2, scores.shape[1]))]
    layers = [
        [given if given is None else given[:, order] for given in (scores, forced, tokens, member)] for order in orders
    ]
    total = int(min(tokens.sum() for _, _, tokens, _ in layers)) // 2
    floor = torch.full((len(scores),), total // len(scores) // 2, dtype=torch.float64, device=DEVICE)
    drawn_layers, counts = [], []
    for s, f, t, m in layers:
        s = s.masked_fill(~t, float("-inf"))
        rank = ranking.ranks(s, f, t, m, unit_scores)
        drawn_layers.append((s, rank, floor, m, unit_scores))
        counts.append(ranking.top_counts(s, rank, floor, total, m, unit_scores))
    s, rank, floor, m, u = (each[0] if each[0] is None else torch.cat(each) for each in zip(*drawn_layers, strict=True))
    assert torch.equal(ranking.top_counts_of_layers(3, s, rank, floor, total, m, u), torch.cat(counts))
    monkeypatch.setattr(ranking, "packs", lambda scores: True)  # as on a GPU
    assert torch.equal(ranking.top_counts_of_layers(3, s, rank, floor, total, m, u), torch.cat(counts))
