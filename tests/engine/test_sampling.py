"""Sampling is a plain loop's, for one row and for many."""

import math

import pytest
import torch

from kvkeep.engine.sampling import Sampler, sample


def test_drawing():
    torch.manual_seed(0)
    logits = torch.randn(4, 50) * 3
    source = torch.Generator().manual_seed(1)
    temperature, top_p = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([1.0, 1e-6, 0.5, 1.0])
    many = torch.stack([sample(logits, temperature, top_p, source) for _ in range(4000)])
    assert many[:, 0].eq(logits[0].argmax()).all() and many[:, 1].eq(logits[1].argmax()).all()
    chances = logits[3].div(2).softmax(-1)
    seen = torch.bincount(many[:, 3], minlength=50) / 4000
    assert (seen - chances).abs().max() < 0.03
    likely, order = logits[2].softmax(-1).sort(descending=True)
    most = int((likely.cumsum(0) < 0.5).sum()) + 1
    assert set(many[:, 2].tolist()) == set(order[:most].tolist())


def plain_chances(logits, temperature, top_p, top_k):
    """Sampling told token by token: the top_k likeliest, of these the likeliest until top_p is made up."""
    each = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(each)), key=lambda token: (-each[token], token))[: top_k or len(each)]
    whole, kept, total = sum(each[token] for token in order), [], 0.0
    for token in order:
        if total >= top_p:
            break
        kept.append(token)
        total += each[token] / whole
    left = sum(each[token] for token in kept)
    return {token: each[token] / left for token in kept}


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 3), (1.0, 1.0, 1), (0.7, 0.8, 5), (2.0, 0.3, 4), (1.0, 1.0, 0), (1.0, 0.6, 500), (1.0, 1.0, 20)],
)
def test_one_and_many_sample_as_a_plain_loop_does(temperature, top_p, top_k):
    torch.manual_seed(0)
    logits, many = torch.randn(20).mul(2).round(decimals=1), 20_000  # some are equal
    want = plain_chances(logits.tolist(), temperature, top_p, top_k)
    source, ones = torch.Generator().manual_seed(1), torch.ones(many)
    drawn = sample(
        logits.expand(many, -1),
        temperature * ones,
        top_p * ones,
        source,
        torch.full((many,), top_k),
    )
    sampler = Sampler(temperature, top_p, 2, top_k)
    for found, count in ((drawn.tolist(), many), ([sampler(logits) for _ in range(4000)], 4000)):
        assert set(found) <= set(want)
        for token, chance in want.items():
            assert abs(found.count(token) / count - chance) < 5 * (chance / count) ** 0.5 + 1e-3


def test_rows_keep_their_own_top_k():
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    temperature, top_k = torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([5, 1, 2, 0])
    source = torch.Generator().manual_seed(1)
    many = torch.stack([sample(logits, temperature, torch.ones(4), source, top_k) for _ in range(3000)])
    assert [len(set(column.tolist())) for column in many.T][:3] == [1, 1, 2]
    assert many[:, 1].eq(logits[1].argmax()).all() and len(set(many[:, 3].tolist())) > 40
