"""The oracles of NACL, CAKE and the layer allocations against numbers worked out by hand."""

import math

import numpy as np
import pytest

from oracles.cake import oracle_cake, preference_cake, scores_cake, variance
from oracles.layers import allocate, cascade_bounds, density_entropy, entropy_budgets, fill, in_turn, whole
from oracles.nacl import gumbel, oracle_nacl, proxies, scores_nacl, split_nacl


def wanted(weights, heads=1):
    """Q, K, V (d = n, scale 1) whose row i of attention is weights[i] brought to sum 1."""
    n = len(weights)
    K = np.eye(n)[None]
    Q = np.zeros((heads, n, n))
    for i in range(n):
        for j in range(i + 1):
            Q[:, i, j] = math.log(weights[i][j])
    return Q, K, K.copy()


def tail(n, *rows):
    """Attention rows: ones everywhere but in the last ones, which are given."""
    return [[1.0] * (i + 1) for i in range(n - len(rows))] + [list(r) for r in rows]


def random_layer(n, heads=4, key_heads=2, d=8, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(heads, n, d)), rng.normal(size=(key_heads, n, d)), rng.normal(size=(key_heads, n, d))


# --- NACL -------------------------------------------------------------------------------------------------------------


def test_nacl_scores_are_the_sum_over_the_proxies():
    Q, K, V = wanted(tail(5, (4, 1, 2, 1), (1, 3, 3, 2, 1)))
    got = scores_nacl(Q, K, V, 4, scale=1.0, window=2)
    assert got[0] == pytest.approx([0.5 + 0.1, 0.125 + 0.3, 0.25 + 0.3, 0.125 + 0.2, 0.1])


def test_nacl_ranks_then_draws_from_the_rest():
    Q, K, V = wanted(tail(6, (5, 1, 4, 2, 3), (1, 1, 1, 1, 1, 1)))
    # B = 4, window 2: rest 2, half of it drawn: one by rank (token 0), one by noise among 1, 2, 3
    noise = np.zeros((1, 6))
    keep = dict(scale=1.0, window=2, random=0.5)
    assert oracle_nacl(Q, K, V, 4, noise=noise, **keep) == [[0, 2, 4, 5]]  # no noise: the next best score
    noise[0] = [99, 7, 0, 0, 99, 99]  # noise on kept tokens does not matter
    assert oracle_nacl(Q, K, V, 4, noise=noise, **keep) == [[0, 1, 4, 5]]
    assert oracle_nacl(Q, K, V, 4, scale=1.0, window=2, random=0.0) == [[0, 2, 4, 5]]
    assert oracle_nacl(Q, K, V, 4, scale=1.0, window=2, random=0.0, sinks=1) == [[0, 2, 4, 5]]


def test_nacl_sampling_weights():
    Q, K, V = wanted(tail(5, (1, 2, 1, 2, 2)))  # scores 1/8, 2/8, 1/8, 2/8, 2/8, one voter
    noise = np.array([[0.5, 0.0, 0.0, 0.0, 0.0]])
    keep = dict(scale=1.0, window=1, random=1.0, noise=noise)
    # B = 2, one drawn of 0..3; softmax keys 0.625, 0.25, 0.125, 0.25 -> token 0
    assert oracle_nacl(Q, K, V, 2, **keep) == [[0, 4]]
    # score keys log(1/8) + 0.5 = -1.579 < log(2/8) = -1.386: tokens 1 and 3 tie, the later wins
    assert oracle_nacl(Q, K, V, 2, sampling="score", **keep) == [[3, 4]]
    assert oracle_nacl(Q, K, V, 2, sampling="uniform", **keep) == [[0, 4]]


def test_nacl_gumbel_draws_follow_the_softmax():
    Q, K, V = wanted(tail(4, (6, 1, 1, 2)))  # scores .6, .1, .1, .2; B = 2 keeps token 3 and draws one of 0, 1, 2
    rng, hits = np.random.default_rng(1), 0
    for _ in range(4000):
        keep = oracle_nacl(Q, K, V, 2, scale=1.0, window=1, random=1.0, noise=gumbel(rng.random((1, 4))))
        hits += 0 in keep[0]
    p = math.exp(0.6) / (math.exp(0.6) + 2 * math.exp(0.1))
    assert hits / 4000 == pytest.approx(p, abs=0.03)
    assert np.isfinite(gumbel([0.0, 1.0])).all()


def test_nacl_split_spends_the_budget():
    assert split_nacl(20, 5, 0, 0.7) == (0, 5, 10)
    assert split_nacl(10, 0, 0, 0.7) == (0, 3, 7)
    assert split_nacl(1, 0, 4, 0.7) == (1, 0, 0)
    assert split_nacl(1, 0, 0, 0.7) == (0, 1, 0)  # a single token is never left to chance
    for budget in range(1, 60):
        rows, stay = proxies(32, budget, 100)
        assert sum(split_nacl(budget, stay, 4)) + stay == budget and 1 <= rows <= 32
    assert proxies(32, 1, 100) == (1, 0)
    assert proxies(32, 20, 100) == (10, 10)
    assert proxies(64, 20, 100, protect=3) == (64, 3)


# --- CAKE -------------------------------------------------------------------------------------------------------------


def test_cake_indicator_by_hand():
    Q, K, V = wanted(tail(5, (4, 1, 2, 1), (1, 3, 3, 2, 1)))
    # columns of the two voting rows: (.5, .1), (.125, .3), (.25, .3); sample variance of (a, b) is (a-b)^2 / 2
    mean, var = [0.3, 0.2125, 0.275], [0.08, 0.0153125, 0.00125]
    got = scores_cake(Q, K, V, 4, scale=1.0, window=2, gamma=10.0, pool=1)
    assert got[0, :3] == pytest.approx([m + 10 * v for m, v in zip(mean, var, strict=True)])
    assert np.isinf(got[0, 3:]).all()
    assert oracle_cake(Q, K, V, 3, scale=1.0, window=1, gamma=0.0, pool=1) == [[1, 2, 4]]  # last row alone: 1, 3, 3, 2
    raw = [m + 10 * v for m, v in zip(mean, var, strict=True)]
    pooled = scores_cake(Q, K, V, 4, scale=1.0, window=2, gamma=10.0, pool=3)
    assert pooled[0, :3] == pytest.approx([sum(raw[:2]) / 2, sum(raw) / 3, sum(raw[1:]) / 2])


def test_cake_gamma_prefers_the_token_of_changing_importance():
    Q, K, V = wanted(tail(4, (3, 1, 2), (3, 5, 1, 1)))
    # token 0: (.5, .3), token 1: (1/6, .5); the means 0.4 > 0.333, the variances 0.02 < 0.0556; window of 2 is kept
    pick = dict(scale=1.0, window=2, pool=1, mean_budget=4)
    assert oracle_cake(Q, K, V, 3, gamma=0.0, **pick) == [[0, 2, 3]]
    assert oracle_cake(Q, K, V, 3, gamma=10.0, **pick) == [[1, 2, 3]]


def test_cake_variance_is_per_query_head_before_the_group_mean():
    one, K, V = wanted(tail(3, (3, 1), (1, 1, 2)))
    two, _, _ = wanted(tail(3, (1, 3), (1, 1, 2)))
    got = scores_cake(np.concatenate([one, two]), K, V, 4, scale=1.0, window=2, gamma=1.0, pool=1)
    # head one: (.75, .25), head two: (.25, .25): means .5, .25, variances .125, 0
    assert got[0, 0] == pytest.approx((0.5 + 0.125 + 0.25) / 2)


def test_cake_preference_by_hand():
    Q, K, _ = wanted(tail(4, (1, 1, 2), (1, 1, 1, 1)))
    # before the window: rows (.25, .25) and (.25, .25)
    H, shift, P = preference_cake(Q, K, 4, scale=1.0, window=2)
    assert (H, shift, P) == pytest.approx((4 * 0.25 * math.log(4), 0.0, 0.0))
    Q, K, _ = wanted(tail(4, (2, 1, 1), (1, 1, 1, 1)))  # rows (.5, .25), (.25, .25): V = .0625 / 2
    H, shift, P = preference_cake(Q, K, 4, scale=1.0, window=2, tau1=2.0, tau2=0.5)
    assert pytest.approx(0.5 * math.log(2) + 0.75 * math.log(4)) == H
    assert shift == pytest.approx(0.03125)
    assert pytest.approx(math.sqrt(H) * shift**2) == P
    assert variance([3.0]) == 0.0 and variance([1.0, 3.0]) == 2.0


# --- layers -----------------------------------------------------------------------------------------------------------


def test_fill_by_hand():
    assert fill([1, 3], 8, [9, 9]) == [2, 6]
    assert fill([1, 3], 8, [9, 5]) == [3, 5]  # the excess moves on
    assert fill([1, 1, 8], 10, [3, 9, 5]) == [2.5, 2.5, 5]
    assert fill([1, 3, 8], 12, [9, 4, 5]) == [3, 4, 5]  # filling one up fills up the next
    assert fill([0, 0], 5, [9, 9]) == [2.5, 2.5]
    assert fill([0, 0, 1], 9, [9, 9, 5]) == [2, 2, 5]
    with pytest.raises(ValueError):
        fill([1, math.nan], 5, [9, 9])


def test_whole_and_allocate_by_hand():
    assert whole([1.5, 1.5, 2.0]) == [2, 1, 2]
    assert whole([0.4, 0.4, 0.4, 0.8]) == [0, 1, 0, 1]
    assert whole([1 / 3] * 3) == [0, 1, 0]
    assert allocate([1, 1, 2], 10, 100, floor=2) == [8, 8, 14]
    assert allocate([1, 0], 10, 12, floor=2) == [12, 8]  # full at n = 12
    assert allocate([5, 1], 1, 9, floor=0) == [1, 1]  # nobody goes empty
    assert allocate([5, 1], 9, 9, floor=2) == [9, 9]
    assert allocate([0, 0, 0], 4, 9, floor=2) == [4, 4, 4]


def test_allocate_is_exact_for_any_weights():
    rng = np.random.default_rng(3)
    for _ in range(500):
        layers, n = int(rng.integers(1, 40)), int(rng.integers(1, 701))
        budget = int(rng.integers(1, n + 1))
        floor = min(32, budget // 2)
        weights = rng.exponential(size=layers) ** rng.integers(1, 6) * (rng.random(layers) > 0.1)
        got = allocate(weights.tolist(), budget, n, floor)
        assert sum(got) == layers * budget
        assert min(got) >= max(1, floor) and max(got) <= n
        assert got == allocate((weights * 7.3).tolist(), budget, n, floor)  # only proportions count
        bounds = cascade_bounds(weights.tolist(), budget, n, floor)
        for m in range(layers):
            assert all(bounds[m][i] >= got[i] for i in range(m + 1))
            assert m == 0 or all(bounds[m][i] <= bounds[m - 1][i] for i in range(m))


def test_density_by_hand():
    Q, K, _ = wanted(tail(4, (1, 1, 2), (1, 3, 1, 1)))
    # before the window: (.5, .5) and (.25, .75) once brought to sum 1
    expected = (math.log(2) + 0.25 * math.log(4) + 0.75 * math.log(4 / 3)) / 2
    assert density_entropy(Q, K, 4, scale=1.0, window=2) == pytest.approx(expected)
    flat, sharp = wanted(tail(6, [1] * 6)), wanted(tail(6, [1e9, 1, 1, 1, 1, 1]))
    thetas = [density_entropy(x[0], x[1], 2, scale=1.0) for x in (flat, sharp)]
    assert thetas[0] == pytest.approx(math.log(5)) and thetas[1] == pytest.approx(0, abs=1e-6)
    assert entropy_budgets(thetas, 2, 6, floor=1) == [3, 1]


def test_recursion_over_layers_is_sharing_in_proportion():
    densities = [3.0, 1.0, 0.5, 2.5]
    assert in_turn(densities, 70) == pytest.approx(fill(densities, 70, [999] * 4))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 33, 64, 130])
def test_every_size_spends_the_budget(n):
    Q, K, V = random_layer(n, seed=n)
    noise = gumbel(np.random.default_rng(n).random((2, n)))
    for budget in sorted({1, 2, 3, n // 3, n // 2, n - 1, n, n + 5} - {0, -1}):
        for protect in (None, 2):
            kept = oracle_nacl(Q, K, V, budget, noise=noise, sinks=2, protect=protect)
            assert all(x == sorted(set(x)) and len(x) == min(n, budget) and x[-1] < n for x in kept)
        kept = oracle_cake(Q, K, V, budget)
        assert all(x == sorted(set(x)) and len(x) == min(n, budget) for x in kept)
        stay = min(32, budget // 2, n)
        assert all(set(range(n - stay, n)) <= set(x) for x in kept)
        H, shift, P = preference_cake(Q, K, budget)
        assert min(H, shift, P, density_entropy(Q, K, budget)) >= 0


def test_large_prompt():
    Q, K, V = random_layer(700, heads=2, key_heads=1)
    assert len(oracle_cake(Q, K, V, 128)[0]) == 128
    assert len(oracle_nacl(Q, K, V, 128, noise=gumbel(np.random.default_rng(0).random((1, 700))))[0]) == 128
