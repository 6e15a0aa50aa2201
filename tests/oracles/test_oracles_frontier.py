"""Hand-computed cases of the frontier oracles: each fails when its formula is wrong."""

import math

import numpy as np
import pytest

from . import frontier as F
from .common import softmax

INF = math.inf
LN2, LN3 = math.log(2), math.log(3)
ZERO = [0.0]  # inv_freq of d = 2 without any rotation


def arr(*heads):
    return np.array(heads, dtype=np.float64)


def draw(seed, heads, key_heads, n, d):
    rng = np.random.default_rng(seed)
    shapes = ((heads, n, d), (key_heads, n, d), (key_heads, n, d))
    return [rng.standard_normal(shape) for shape in shapes], [10.0 ** -(i / d) for i in range(d // 2)]


# ---------------------------------------------------------------------------------------------- common ground


def test_rotate_by_hand():
    assert F.rotate([1.0, 0.0], 3, [math.pi / 2]) == pytest.approx([0.0, -1.0])
    assert F.rotate([0.0, 1.0], 1, [math.pi / 2]) == pytest.approx([-1.0, 0.0])
    # halves, not neighbours: channel 1 pairs with channel 3 and has the second frequency
    assert F.rotate([0.0, 1.0, 0.0, 0.0], 2, [9.0, 0.5]) == pytest.approx([0.0, math.cos(1), 0.0, math.sin(1)])


def test_rotations_undo_and_see_only_distance():
    (Q, K, _), freq = draw(0, 1, 1, 5, 6)
    turned = np.array([F.rotate(x, p, freq) for p, x in enumerate(Q[0])])
    assert F.unrotate_all(turned, freq) == pytest.approx(Q[0])
    near = F.rotate(Q[0, 1], 9, freq) @ F.rotate(K[0, 2], 4, freq)
    assert near == pytest.approx(F.rotate(Q[0, 1], 105, freq) @ F.rotate(K[0, 2], 100, freq))


@pytest.mark.parametrize(
    ("n", "budget", "sinks", "recent", "expected"),
    [
        (9, 6, 2, 3, [0, 1, 6, 7, 8]),
        (9, 4, 2, 3, [0, 6, 7, 8]),  # the sinks yield
        (9, 2, 2, 3, [7, 8]),  # then the older of the recent
        (9, 3, 4, 0, [0, 1, 2]),
        (3, 9, 2, 2, [0, 1, 2]),
    ],
)
def test_guard(n, budget, sinks, recent, expected):
    assert F.guard(n, budget, sinks, recent) == expected


def test_zscore_is_of_the_whole_layer():
    assert F.zscore(arr([1, 3], [5, 7])) == pytest.approx(arr([-3, -1], [1, 3]) / math.sqrt(5))
    assert F.zscore(arr([2, 2])).tolist() == [[0, 0]]


# ------------------------------------------------------------------------------------- random, knorm, keydiff


def test_random_takes_the_largest():
    K = np.zeros((2, 3, 2))
    table = [[0.1, 0.9, 0.5], [0.3, 0.2, 0.3]]
    assert F.scores_random(None, K, K, 1, uniform=table).tolist() == table
    assert F.oracle_random(None, K, K, 1, uniform=table) == [[1], [2]]
    assert F.oracle_random(None, K, K, 3, uniform=table) == [[0, 1, 2]] * 2


def test_knorm_by_hand():
    K = arr([[3, 4], [0, 1], [-1, 0]], [[0, 2], [3, 3], [0, 5]])
    assert F.scores_knorm(None, K, K, 1) == pytest.approx(-arr([5, 1, 1], [2, math.sqrt(18), 5]))
    assert F.oracle_knorm(None, K, K, 1) == [[2], [0]]  # the later of two equals


def test_keydiff_by_hand():
    # unit keys (1,0), (0,1), (0,1): their mean points to (1,2); the mean of the raw keys would point to (1,1)
    K = arr([[2, 0], [0, 1], [0, 1]])
    expected = -arr([1, 2, 2]) / math.sqrt(5)
    assert F.scores_keydiff(None, K, K, 1) == pytest.approx(expected)
    assert F.oracle_keydiff(None, K, K, 2) == [[0, 2]]
    assert F.scores_keydiff(None, arr([[0, 0], [0, 7]]), K, 1) == pytest.approx(arr([0, -1]))


# ------------------------------------------------------------------------------------------------------ lagkv


def test_lag_spread_by_hand():
    after = arr([0, 0], [2, 4])
    # (1, 0) deviates by sqrt(1/2) (unbiased), (1/2, 1/2) by nothing
    weight = math.exp(math.sqrt(0.5))
    assert F.lag_spread(arr([2, 0], [1, 2]), after) == pytest.approx([weight / (1 + weight), 1 / (1 + weight)])
    # the second channel is flat in the reference and gives 0: (0, 0) and (3, 0)
    weight = math.exp(3 / math.sqrt(2))
    got = F.lag_spread(arr([0, 9], [3, 9]), arr([0, 5], [1, 5]))
    assert got == pytest.approx([1 / (1 + weight), weight / (1 + weight)])


def test_lag_ranks():
    assert F.lag_ranks([0.3, 0.1, 0.3, 0.2]).tolist() == [0.5, 0.0, 0.75, 0.25]


def lag_case():
    """One sink, three partitions of two, one token of tail."""
    K = arr([[9, 9], [2, 0], [1, 2], [0, 0], [2, 4], [0, 0], [1, 1], [7, 7]])
    V = arr([[9, 9], [0, 9], [0.5, 9], [0, 5], [1, 5], [0, 0], [4, 4], [7, 7]])
    return K, V


def test_lagkv_by_hand():
    K, V = lag_case()
    # Tokens 1, 2: spreads .707, 0 by keys; 0, .354 by values: token 1 wins. Tokens 3, 4: keys (0,0), (2,4) scaled by
    # 0..1 spread 0, 1.41; values (0,5/4), (1/4,5/4) spread .884, .707: token 4 wins.
    # Own instead of next extremes: the keys of 3 and 4 would tie and 3 win by values; values alone: 2 and 3 win.
    scores = F.scores_lagkv(None, K, V, 6, sinks=1, lag=2)
    assert scores.tolist() == [[INF, 0.5, 0.0, 0.0, 0.5, INF, INF, INF]]
    assert F.oracle_lagkv(None, K, V, 6, sinks=1, lag=2) == [[0, 1, 4, 5, 6, 7]]
    assert F.oracle_lagkv(None, K, V, 5, sinks=1, lag=2) == [[0, 4, 5, 6, 7]]
    # strong values turn the first pair: spreads 0 and 2.12
    V[0, 2, 0] = 3
    assert F.oracle_lagkv(None, K, V, 6, sinks=1, lag=2) == [[0, 2, 4, 5, 6, 7]]


def test_lagkv_adds_softmaxes_not_spreads():
    # spreads by keys 2, 0, 0, by values 0, 2.1, 2: token 1 has the largest sum, but the values' softmax is split in
    # two (.06, .49, .45) and the keys' is not (.79, .11, .11)
    root = math.sqrt(2)
    K = arr([[2 * root, 0], [0, 0], [0, 0], [0, 0], [1, 1], [0, 0]])
    V = arr([[0, 0], [2.1 * root, 0], [2 * root, 0], [0, 0], [1, 1], [0, 0]])
    assert F.scores_lagkv(None, K, V, 4, sinks=0, lag=3)[0, :3].tolist() == [2 / 3, 1 / 3, 0]


def test_lagkv_shrinks_and_falls_back_to_recency():
    K, V = lag_case()
    assert F.oracle_lagkv(None, K, V, 3, sinks=1, lag=2) == [[5, 6, 7]]
    assert F.oracle_lagkv(None, K, V, 2, sinks=1, lag=2) == [[6, 7]]
    assert F.scores_lagkv(None, K, V, 3, sinks=4, lag=3).tolist() == [list(range(8))]
    assert F.oracle_lagkv(None, K, V, 3, sinks=4, lag=3) == [[5, 6, 7]]


# ----------------------------------------------------------------------------------------- expected attention


def test_mean_rotation_is_the_mean_of_rotations():
    (Q, _, _), freq = draw(1, 1, 1, 1, 6)
    mean = sum(F.rotate(Q[0, 0], p, freq) for p in (7, 8, 9)) / 3
    assert F.mean_rotation(7, 3, freq) @ Q[0, 0] == pytest.approx(mean)


def test_expected_attention_without_spread_is_a_softmax():
    (_, K, V), freq = draw(2, 1, 1, 6, 4)
    mu = np.array([0.5, -1.0, 2.0, 0.3])
    Q = arr([F.rotate(mu, p, freq) for p in range(6)])
    future = (F.rotate(mu, 6, freq) + F.rotate(mu, 7, freq)) / 2
    expected = softmax(K[0, 1:] @ future / 2)
    got = F.scores_expected_attention(Q, K, V, 4, inv_freq=freq, future=2, sinks=1, values=False)
    assert got[0, 0] == INF
    assert got[0, 1:] == pytest.approx(expected)
    weighted = F.scores_expected_attention(Q, K, V, 4, inv_freq=freq, future=2, sinks=1, epsilon=0.02)
    assert weighted[0, 1:] == pytest.approx((expected + 0.02) * np.sqrt((V[0, 1:] ** 2).sum(axis=1)))


def test_expected_attention_covariance_by_hand():
    # the sink's query is left out; the others are +1 and -1: mean 0, population variance 1, logit k² / 2d = k² / 4
    Q = arr([[50, 50], [1, 0], [-1, 0]])
    K = arr([[30, 30], [2, 5], [0, 7]])
    V = arr([[1, 1], [3, 4], [0, 1]])
    options = {"inv_freq": ZERO, "future": 5, "sinks": 1}
    share = math.e / (1 + math.e)
    got = F.scores_expected_attention(Q, K, V, 2, **options)
    assert got == pytest.approx(arr([INF, share * 5, 1 - share]))
    assert F.oracle_expected_attention(Q, K, V, 2, **options) == [[0, 1]]
    got = F.scores_expected_attention(Q, K, V, 2, covariance=False, values=False, **options)
    assert got == pytest.approx(arr([INF, 0.5, 0.5]))


def test_expected_attention_variance_is_that_of_the_moved_queries():
    (Q, K, V), freq = draw(3, 4, 2, 7, 4)
    got = F.scores_expected_attention(Q, K, V, 3, inv_freq=freq, future=1, sinks=2, values=False)
    for kh in range(2):
        per_head = []
        for h in (2 * kh, 2 * kh + 1):
            moved = np.array([F.rotate(Q[h, p], 7 - p, freq) for p in range(2, 7)])  # future=1: all at position 7
            logits = moved @ K[kh, 2:].T / 2
            per_head.append(softmax(logits.mean(axis=0) + logits.var(axis=0) / 2))
        assert got[kh, 2:] == pytest.approx((per_head[0] + per_head[1]) / 2)  # mean of softmaxes
    assert (got[:, :2] == INF).all()


def test_expected_attention_on_a_handful_of_tokens():
    (Q, K, V), freq = draw(4, 2, 1, 3, 4)
    got = F.scores_expected_attention(Q, K, V, 2, inv_freq=freq, sinks=4)
    assert got.tolist() == [[INF, INF, 0.0]]


# -------------------------------------------------------------------------------------------------- compactor


def test_leverage_by_hand():
    # centred ±(1, 0); four columns of ones over sqrt(4): |x|² = 1, XᵀX has the one eigenvalue 2
    got = F.leverage(arr([0, 5], [2, 5]), np.ones((2, 4)), 0.01, ZERO)
    assert got == pytest.approx([1 / 2.01, 1 / 2.01])
    # x = -1, -1, 2: 1/6.5, 1/6.5, 4/6.5
    got = F.leverage(arr([0, 0], [0, 0], [3, 0]), arr([1], [7]), 0.5, ZERO)
    assert got == pytest.approx([1 / 6.5, 1 / 6.5, 4 / 6.5])


def test_leverage_sees_unrotated_keys():
    freq = [1.0, 0.3]
    same = arr(*[F.rotate([1.0, 2.0, 3.0, 4.0], p, freq) for p in range(4)])
    assert F.leverage(same, np.eye(4), 0.01, freq) == pytest.approx([0, 0, 0, 0])


def test_chunk_columns_by_hand():
    # d = 2, but the logits are ln 3 and 0, not ln 3 / sqrt(2); query 0 sees key 1 (no causality), key 2 is alone
    q, k = arr([LN3, 0], [0, 0], [5, 5]), arr([1, 0], [0, 0], [9, 9])
    assert F.chunk_columns(q, k, 2) == pytest.approx([0.75 + 0.5, 0.25 + 0.5, 1])


def test_compactor_attention_by_hand():
    q = [[LN3, 0], [0, 0], [5, 5]]
    Q, K, V = arr(q, np.zeros((3, 2))), arr([[1, 0], [0, 0], [9, 9]]), arr([[0, 4], [8, 0], [6, 8]])
    # group mean of (1.25, .75, 1) and (1, 1, 1), times 4, 8, 10, pooled
    w = [1.125 * 4, 0.875 * 8, 10.0]
    expected = arr([(w[0] + w[1]) / 2, sum(w) / 3, (w[1] + w[2]) / 2])
    assert F.compactor_attention(Q, K, V, 2) == pytest.approx(expected)


def test_compactor_adds_z_scores():
    # a: leverages 1, 1, 4 in proportion: z -1, -1, 2 over sqrt(2). b: zero queries, so |v| = 2, 4, 6 pooled to 3, 4, 5:
    # z -1, 0, 1 over sqrt(2/3)
    K, Q, V = arr([[0, 0], [0, 0], [3, 0]]), np.zeros((1, 3, 2)), arr([[2, 0], [0, 4], [6, 0]])
    options = {"inv_freq": ZERO, "gaussian": arr([1], [0]), "chunk": 3, "ridge": 0.5}
    got = F.scores_compactor(Q, K, V, 1, sinks=0, recent=0, **options)
    a, b = arr([-1, -1, 2]) / math.sqrt(2), arr([-1, 0, 1]) / math.sqrt(2 / 3)
    assert got == pytest.approx(2 / 3 * a + b)  # two of three are removed
    assert F.oracle_compactor(Q, K, V, 2, sinks=0, recent=0, **options) == [[1, 2]]
    assert F.oracle_compactor(Q, K, V, 2, sinks=1, recent=1, **options) == [[0, 2]]


# ------------------------------------------------------------------------------------------------------- echo


def echo_case():
    return arr([[1, 0], [0, 1]]), arr([[0, -LN2], [LN3, 0]])


def test_echo_of_two_tokens_by_hand():
    Q, K = echo_case()
    # delta = 2 + 1 - 0 = 3 quarter turns: (1,0) -> (0,-1), (0,1) -> (1,0).
    # Query 0: chunk 2, 1, copy 1 -> 1/2, 1/4. Query 1: chunk 1, 3, copy 1/2, 1 -> 2/11, 6/11.
    got = F.scores_echo(Q, K, K, 1, inv_freq=[math.pi / 2], scale=1.0, chunk=2, sinks=0, gap=1)
    assert got == pytest.approx(arr([1 / 2, 6 / 11]))
    assert F.oracle_echo(Q, K, K, 1, inv_freq=[math.pi / 2], scale=1.0, chunk=2, sinks=0, gap=1) == [[1]]


def test_echo_of_near_queries_by_hand():
    Q, K = echo_case()
    options = {"inv_freq": [math.pi / 2], "scale": 1.0, "chunk": 2, "sinks": 0, "gap": 1}
    # near=1: all. Token 0: query 0 pays 1/2, query 1 pays 2/11; token 1: 1/4 and 6/11.
    assert F.scores_echo(Q, K, K, 1, near=1, **options) == pytest.approx(arr([1 / 2, 6 / 11]))
    swapped = K[:, ::-1]
    # Query 0: chunk 1, 2, copy 3 -> 1/6, 1/3. Query 1: chunk 3, 1, copy 1, 1/2 -> 6/11, 2/11.
    assert F.scores_echo(Q, swapped, K, 1, near=1, **options) == pytest.approx(arr([6 / 11, 1 / 3]))
    assert F.scores_echo(Q, swapped, K, 1, near=0, **options) == pytest.approx(arr([1 / 6, 2 / 11]))


def test_echo_in_chunks_with_a_sink_by_hand():
    Q, K = echo_case()
    options = {"inv_freq": [math.pi / 2], "scale": 1.0, "chunk": 1, "gap": 1}
    # chunk 0: moved by 3 quarters: chunk 2, copy 1. Chunk 1: by 2: (0,1) -> (0,-1): sink 2, chunk 1, copy 1.
    assert F.scores_echo(Q, K, K, 1, sinks=0, **options) == pytest.approx(arr([2 / 3, 1 / 2]))
    assert F.scores_echo(Q, K, K, 1, sinks=1, **options) == pytest.approx(arr([INF, 1 / 4]))
    # a second query head of zeros pays 1/3 to each: the larger counts
    both = np.concatenate([Q, np.zeros((1, 2, 2))])
    assert F.scores_echo(both, K, K, 1, sinks=1, **options) == pytest.approx(arr([INF, 1 / 3]))
    assert F.oracle_echo(both, K, K, 1, sinks=1, **options) == [[0]]


def test_echo_is_the_attention_of_a_copy_that_stands_behind():
    (Q, K, V), freq = draw(5, 4, 2, 11, 4)
    got = F.scores_echo(Q, K, V, 5, inv_freq=freq, chunk=4, sinks=2, gap=3)
    expected = np.zeros((2, 11))
    for h in range(4):
        for i in range(11):
            s = i // 4 * 4
            e, delta = min(s + 4, 11), 11 + 3 - s
            moved = F.rotate(Q[h, i], delta, freq)
            copy = [F.rotate(K[h // 2, j], delta, freq) for j in range(s, i + 1)]  # the keys of the repetition
            sinks = [K[h // 2, j] for j in range(min(2, s))]
            p = softmax(np.array([k @ moved / 2 for k in [*sinks, *K[h // 2, s:e], *copy]]))[len(sinks) :]
            for j in range(s, e):
                expected[h // 2, j] = max(expected[h // 2, j], p[j - s])
    assert got[:, 2:] == pytest.approx(expected[:, 2:])
    assert (got[:, :2] == INF).all()


# -------------------------------------------------------------------------------------- allocators, modifiers


def test_shared_by_hand():
    scores = [arr([0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.3, 0.05]), arr([0.5, 0.1, 0.1, 0.1], [0.4, 0.65, 0.0, 0.0])]
    none = [[[], []], [[], []]]
    assert F.shared(scores, none, 1) == [[[0, 1, 2], []], [[], [1]]]  # 4 in all: .9 .8 .7 .65
    assert F.shared(scores, none, 2, 0.5) == [[[0, 1, 2, 3], [2]], [[0], [0, 1]]]
    assert F.shared(scores, none, 1, 1.0) == [[[0], [2]], [[0], [1]]]
    assert F.shared(scores, none, 4) == [[[0, 1, 2, 3]] * 2] * 2


def test_shared_forced_tokens_are_part_of_the_floor():
    scores = [arr([INF, 0.8, 0.7, 0.6], [INF, 0.2, 0.3, 0.05])]
    assert F.shared(scores, [[[0], [0]]], 2) == [[[0, 1, 2], [0]]]
    assert F.shared(scores, [[[0], [0]]], 2, 0.5) == [[[0, 1, 2], [0]]]
    assert F.shared(scores, [[[0], [0]]], 2, 1.0) == [[[0, 1], [0, 2]]]


def test_shared_ties_later_token_then_lower_head_then_lower_layer():
    flat = [np.zeros((2, 3)), np.zeros((2, 3))]
    none = [[[], []], [[], []]]
    assert F.shared(flat, none, 1) == [[[2], [2]], [[2], [2]]]
    flat[1][1, 0] = 1.0  # takes one of the four places: layer 1, head 1 loses its last token
    assert F.shared(flat, none, 1) == [[[2], [2]], [[2], [0]]]
    flat[0][1, 0] = 1.0  # two places left: head 0 of both layers
    assert F.shared(flat, none, 1) == [[[2], [0]], [[2], [0]]]
    flat[0][1, 1] = 1.0  # one place left: head 0 of layer 0
    assert F.shared(flat, none, 1) == [[[2], [0, 1]], [[], [0]]]


def test_threshold_by_hand():
    scores = arr([INF, 0.5, 0.1, 0.7, 0.3], [INF, 0.0, 0.1, 0.05, 0.0])
    forced = [[0], [0]]
    assert F.threshold(scores, forced, 4, 0.1) == [[0, 1, 3, 4], [0]]  # .1 is not above .1
    assert F.threshold(scores, forced, 3, 0.1) == [[0, 1, 3], [0]]
    assert F.threshold(scores, forced, 3, 0.01) == [[0, 1, 3], [0, 2, 3]]
    assert F.threshold(scores, forced, 5, 0.1) == [[0, 1, 2, 3, 4]] * 2  # n <= B: nothing is dropped
    assert F.threshold(scores[1:, 1:], [[]], 2, 0.5) == [[]]
    assert F.threshold(np.ones((1, 4)), [[]], 2, 0.5) == [[2, 3]]  # ties to the later token


def test_projected_by_hand():
    # group of two: |(1·3 + 2·4, 0)|_1 = 11 and |(-3, 4)|_1 = 7
    wo = arr([[1, 2], [0, 0]], [[-1, 0], [0, 1]])
    assert F.projected(arr([[3, 4]]), wo, 2) == pytest.approx(arr([9]))


def test_critical_by_hand():
    scores = arr([INF, 0.5, 0.4, 0.3, 0.0, 0.1])
    values = arr([[9, 9], [1, 0], [1, 0], [1, 0], [50000, 0], [0, 6]])
    wo = arr([[1, 0], [0, 1]])
    # one of two by score (1); the rest by (s + 1e-4)·|v|: .4001, .3001, 5, .6006
    assert F.critical(scores, [[0]], values, wo, 3) == [[0, 1, 4]]
    assert F.critical(scores, [[0]], values, wo, 4) == [[0, 1, 4, 5]]  # floor(1.5) = 1 by score
    assert F.critical(scores, [[0]], values, wo, 3, epsilon=0.0) == [[0, 1, 5]]
    assert F.critical(scores, [[0]], values, wo, 3, share=1.0) == [[0, 1, 2]]
    assert F.critical(scores, [[0]], values, wo, 3, share=0.0) == [[0, 4, 5]]
    assert F.critical(scores, [[0]], values, wo, 6) == [[0, 1, 2, 3, 4, 5]]
    assert F.critical(np.ones((1, 4)), [[]], np.ones((1, 4, 2)), wo, 2) == [[2, 3]]  # ties to the later token, twice


# ---------------------------------------------------------------------------------------------- random shapes


@pytest.mark.parametrize("n", [3, 13, 30])
@pytest.mark.parametrize("budget", [1, 5, 12, 29])
@pytest.mark.parametrize("group", [1, 3])
def test_every_oracle_spends_the_budget(n, budget, group):
    (Q, K, V), freq = draw(n * budget, 2 * group, 2, n, 4)
    rng = np.random.default_rng(0)
    kept = [
        F.oracle_knorm(Q, K, V, budget),
        F.oracle_keydiff(Q, K, V, budget),
        F.oracle_lagkv(Q, K, V, budget, sinks=2, lag=5),
        F.oracle_random(Q, K, V, budget, uniform=rng.random((2, n))),
        F.oracle_expected_attention(Q, K, V, budget, inv_freq=freq, future=9),
        F.oracle_compactor(Q, K, V, budget, inv_freq=freq, gaussian=rng.standard_normal((4, 6)), chunk=7),
        F.oracle_echo(Q, K, V, budget, inv_freq=freq, chunk=6),
    ]
    for heads in kept:
        assert len(heads) == 2
        assert all(head == sorted(set(head)) and len(head) == min(n, budget) for head in heads)
    scores = F.scores_echo(Q, K, V, budget, inv_freq=freq, chunk=6)
    forced = [F.guard(n, budget, 4)] * 2
    everywhere = F.shared([scores, scores / 2], [forced, forced], budget, 0.3)
    assert sum(len(head) for layer in everywhere for head in layer) == 4 * min(n, budget)
    assert F.shared([scores], [forced], budget, 1.0) == [F.oracle_echo(Q, K, V, budget, inv_freq=freq, chunk=6)]
    assert F.threshold(scores, forced, budget, -1.0) == F.oracle_echo(Q, K, V, budget, inv_freq=freq, chunk=6)
    wo = rng.standard_normal((2 * group, 5, 4))
    assert all(len(h) == min(n, budget) for h in F.critical(scores, forced, V, wo, budget, 0.5, 1e-4, group))
