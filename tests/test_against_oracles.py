"""Every method against a plain-loop float64 transcription of its specification, written without sight of the code."""

import numpy as np
import pytest
import torch
from oracles.allocation import adakv, kept_by_quota, pyramid
from oracles.full import oracle_full, oracle_streamingllm
from oracles.intentkv import oracle_intentkv, scores_intentkv
from oracles.snapkv import oracle_snapkv, scores_snapkv
from oracles.tova import oracle_tova, scores_tova

import kvkeep
from kvkeep.compress.allocate.heads import AdaptiveHeads
from kvkeep.compress.allocate.layers import Pyramid

HEADS = [(4, 4), (4, 2), (6, 2), (4, 1), (8, 2)]
LENGTHS = [1, 2, 3, 7, 17, 31, 63, 64, 65, 100, 129, 257, 700]


def draw(seed: int):
    """Queries, keys and values of a random shape, some with duplicated keys; and a budget, often near an edge."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    n, dim = LENGTHS[seed % len(LENGTHS)], int(rng.choice([8, 16, 33]))
    q, k, v = (rng.standard_normal((h, n, dim)) * s for h, s in ((heads, 2.0), (kv_heads, 1.0), (kv_heads, 1.0)))
    if seed % 4 == 0:  # ties: later tokens repeat earlier keys
        half = n // 2
        k[:, half : 2 * half] = k[:, :half]
    budget = int(rng.choice([1, 2, max(1, n // 8), max(1, n // 3), max(1, n - 1), n, n + 1, 10]))
    return q, k, v, budget


def ours(spec, q, k, v, budget, **parameters):
    return kvkeep.select(spec, *(torch.from_numpy(x) for x in (q, k, v)), budget, **parameters).tolist()


def assert_same(kept, expected, scores):
    """Equal sets; where float32 cannot tell two scores apart, equal scores at the border."""
    assert [len(head) for head in kept] == [len(head) for head in expected]
    for head, (mine, theirs) in enumerate(zip(kept, expected, strict=True)):
        assert mine == sorted(set(mine))
        if odd := set(mine) ^ set(theirs):
            worst = min(scores[head][j] for j in theirs)
            assert all(abs(scores[head][j] - worst) <= 2e-6 * max(1e-3, abs(worst)) for j in odd), (head, sorted(odd))


@pytest.mark.parametrize("seed", range(60))
def test_snapkv(seed):
    q, k, v, budget = draw(seed)
    window, pool, kind = [(64, 5, "avg"), (32, 7, "max"), (8, 3, "avg"), (5, 1, "avg")][seed % 4]
    expected = oracle_snapkv(q, k, v, budget, window=window, pool=pool, kind=kind)
    scores = scores_snapkv(q, k, v, budget, window=window, pool=pool, kind=kind)
    assert_same(ours("snapkv", q, k, v, budget, window=window, pool=pool, pooling=kind), expected, scores)


@pytest.mark.parametrize("seed", range(60))
def test_tova(seed):
    q, k, v, budget = draw(seed)
    assert_same(ours("tova", q, k, v, budget), oracle_tova(q, k, v, budget), scores_tova(q, k, v, budget))


@pytest.mark.parametrize("seed", range(60))
def test_intentkv(seed):
    q, k, v, budget = draw(seed)
    options = [{}, {"block": 1}, {"intention": False}, {"block": 5, "window": 20, "smooth": 3}, {"recent": 3, "sinks": 2}][seed % 5]
    forced = options.get("recent", 0) + options.get("sinks", 0)
    budget = max(budget, forced)
    expected = oracle_intentkv(q, k, v, budget, **options)
    kept = ours("intentkv", q, k, v, budget, **options)
    if kept != expected:  # a float32 tie between blocks: the same number of tokens, of equally good blocks
        scores = scores_intentkv(q, k, v, budget, **options)
        for mine, theirs, score in zip(kept, expected, scores, strict=True):
            worth = [sum(score[j] for j in side if np.isfinite(score[j])) for side in (mine, theirs)]
            assert len(mine) == len(theirs) and worth[0] == pytest.approx(worth[1], rel=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_full_and_streaming(seed):
    q, k, v, budget = draw(seed)
    assert ours("full", q, k, v, budget) == oracle_full(q, k, v, budget)
    budget += 4
    assert ours("streamingllm", q, k, v, budget) == oracle_streamingllm(q, k, v, budget)


@pytest.mark.parametrize("seed", range(60))
def test_pyramid_budgets(seed):
    rng = np.random.default_rng(seed)
    tokens, layers = int(rng.integers(1, 700)), int(rng.integers(1, 40))
    budget = int(rng.integers(1, tokens + 3))
    floor = int(rng.integers(0, budget // 2 + 1))
    shares = Pyramid(int(rng.integers(1, 30)))(budget, floor, tokens, layers) if seed % 2 else Pyramid()(budget, floor, tokens, layers)
    assert sum(shares) == layers * min(budget, tokens)
    assert all(min(floor, tokens) <= share <= tokens for share in shares)
    if not seed % 2:
        assert shares == pyramid(budget, layers, tokens, floor)


@pytest.mark.parametrize("seed", range(60))
def test_adakv_quotas(seed):
    rng = np.random.default_rng(seed)
    heads, n = int(rng.integers(1, 6)), int(rng.integers(1, 200))
    budget, alpha = int(rng.integers(1, n + 1)), float(rng.choice([0.0, 0.2, 0.5, 1.0]))
    scores = rng.integers(0, 5, (heads, n)).astype(float) if seed % 3 == 0 else rng.random((heads, n)).astype(np.float32)
    forced = np.zeros((heads, n), dtype=bool)
    forced[:, n - budget // 3 :] = budget // 3 > 0
    quota = AdaptiveHeads(alpha)(torch.from_numpy(np.asarray(scores)), torch.from_numpy(forced), [n] * heads, budget)
    assert quota == adakv(scores, [set(np.flatnonzero(row)) for row in forced], budget, alpha)
    assert sum(quota) == heads * budget


@pytest.mark.parametrize("seed", range(50))
def test_snapkv_with_adakv(seed):
    q, k, v, budget = draw(seed)
    budget = min(budget, max(1, k.shape[1] - 1))
    scores = scores_snapkv(q, k, v, budget)
    forced = [set(np.flatnonzero(np.isinf(row))) for row in scores]
    kept, expected = ours("snapkv+adakv", q, k, v, budget), kept_by_quota(scores, forced, adakv(scores, forced, budget, 0.2))
    if [len(head) for head in kept] == [len(head) for head in expected]:
        return assert_same(kept, expected, scores)
    # a float32 tie between heads: as many tokens in all, worth as much
    worth = [sum(min(scores[h][j], 1.0) for h, head in enumerate(side) for j in head) for side in (kept, expected)]
    assert sum(map(len, kept)) == sum(map(len, expected)) and worth[0] == pytest.approx(worth[1], rel=1e-6)
