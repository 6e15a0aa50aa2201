"""Sampling is a plain loop's, and a row's does not depend on the rows beside it."""

import math

import pytest
import torch

from kvkeep.engine.sampling import Generation, SamplingRows, gumbel


def plain_noise(seed, position, token):
    """splitmix64, told with Python's own numbers."""

    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    bits = mix((mix((mix(seed) + position) % 2**64) + token * 0x9E3779B97F4A7C15) % 2**64)
    return -math.log(-math.log(((bits >> 11) + 0.5) / 2**53))


def test_noise_is_a_plain_loops():
    seeds, positions = torch.tensor([0, 7, 2**63 - 1, 7]), torch.tensor([0, 5, 131_072, 6])
    rows = zip(seeds.tolist(), positions.tolist(), strict=True)
    want = [[plain_noise(seed, at, token) for token in range(50)] for seed, at in rows]
    torch.testing.assert_close(gumbel(seeds, positions, 50), torch.tensor(want), atol=1e-5, rtol=1e-5)


def plain_chances(logits, temperature, top_p, top_k, min_p=0.0):
    """Sampling told token by token: of what min_p leaves the top_k likeliest, of these the first that make up top_p."""
    each = [math.exp(x / temperature) for x in logits]
    left = [token for token in range(len(each)) if each[token] / max(each) >= min_p]
    order = sorted(left, key=lambda token: (-each[token], token))[: top_k or len(each)]
    whole, kept, total = sum(each[token] for token in order), [], 0.0
    for token in order:
        if total >= top_p:
            break
        kept.append(token)
        total += each[token] / whole
    left = sum(each[token] for token in kept)
    return {token: each[token] / left for token in kept}


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        (1.0, 1.0, 3, 0), (1.0, 1.0, 1, 0), (0.7, 0.8, 5, 0), (2.0, 0.3, 4, 0), (1.0, 1.0, 0, 0), (1.0, 0.6, 500, 0),
        (1.0, 1.0, 20, 0), (1.0, 1.0, 0, 0.2), (2.0, 1.0, 0, 0.2), (1.0, 0.8, 0, 0.03), (1.0, 1.0, 0, 1.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_tokens_come_as_often_as_a_plain_loop_says(temperature, top_p, top_k, min_p, along):
    torch.manual_seed(0)
    logits, many = torch.randn(20).mul(2).round(decimals=1), 20_000  # some are equal
    want = plain_chances(logits.tolist(), temperature, top_p, top_k, min_p)
    rows = SamplingRows(many, "cpu")
    rows.hows = [Generation(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)] * many
    rows.temperature += temperature
    rows.top_p *= top_p
    rows.top_k += top_k
    rows.min_p += min_p
    counted, zeros = torch.arange(many), torch.zeros(many, dtype=torch.int64)
    rows.seed, positions = (zeros, counted) if along == "positions" else (counted, zeros)
    found = rows.sample(logits.expand(many, -1), positions).tolist()
    assert set(found) <= set(want)
    for token, chance in want.items():
        assert abs(found.count(token) / many - chance) < 5 * (chance / many) ** 0.5 + 1e-3


def test_a_row_is_sampled_as_it_is_alone():
    torch.manual_seed(0)
    logits, positions = torch.randn(5, 300), torch.tensor([9, 4, 9, 70, 9])
    hows = [
        Generation(), Generation(temperature=1.0, seed=3), Generation(temperature=1.0, top_k=2, seed=3),
        Generation(temperature=0.5, top_p=0.7, min_p=0.1), Generation(temperature=9.0, top_k=1),
    ]  # fmt: skip
    together = SamplingRows.of(hows, "cpu").sample(logits, positions)
    for row, how in enumerate(hows):
        alone = SamplingRows.of([how], "cpu").sample(logits[row : row + 1], positions[row : row + 1])
        assert alone == together[row]
    assert together[[0, 4]].equal(logits[[0, 4]].argmax(-1))


def test_a_row_that_is_free_again_is_greedy():
    rows, logits = SamplingRows(2, "cpu"), torch.randn(2, 300)
    rows.set(1, Generation(temperature=50.0))
    assert rows.samples(2) and not rows.samples(1)
    rows.set(1, None)
    assert not rows.samples(2) and rows.sample(logits, torch.zeros(2, dtype=torch.int64)).equal(logits.argmax(-1))


def test_a_row_that_is_used_again_samples_as_a_new_one():
    logits, positions = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)), torch.tensor([5, 5])
    used, new = SamplingRows(2, "cpu"), SamplingRows(2, "cpu")
    used.set(0, Generation(temperature=1.0, top_p=0.05, top_k=1))
    used.set(0, None)
    for seed in range(20):
        for rows in (used, new):
            rows.set(0, Generation(temperature=1.0, seed=seed))
            rows.set(1, Generation(temperature=1.0, top_k=5))  # so that rows are filtered
        assert torch.equal(used.sample(logits, positions), new.sample(logits, positions))
