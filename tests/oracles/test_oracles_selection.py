"""Checks of the oracles themselves: tiny cases whose answers were worked out by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest

from oracles import common
from oracles.ahakv import gain, oracle_ahakv, scores_ahakv, value_prior_of
from oracles.allocation import adakv, kept_by_quota, pyramid, selection_order
from oracles.full import oracle_full, oracle_lm_infinite, oracle_streamingllm
from oracles.h2o import oracle_h2o, scores_h2o
from oracles.intelllm import default_gap, oracle_intelllm, placement_intelllm, scores_intelllm
from oracles.intentkv import intention_start, jsd, oracle_intentkv, scores_intentkv, votes_intentkv
from oracles.protokv import (
    bucket_of,
    chunk_count,
    cluster_worth,
    clusters_of,
    lsh_size,
    neighbour_similarity,
    oracle_protokv,
    oracle_satkv,
    outlier_degree,
    random_features,
    ranges_of,
    scores_protokv,
    votes_protokv,
)
from oracles.sampling import sampling_probabilities
from oracles.snapkv import oracle_chunkkv, oracle_snapkv, scores_snapkv
from oracles.streams import stream
from oracles.tova import oracle_tova, scores_tova

NEVER = -1e4  # a logit whose softmax weight is exactly 0


def scene(rows, n, heads=1, key_heads=1):
    """Q, K, V whose attention (scale=1) is what `rows` says.

    rows[(head, token)] = {key: weight}; a query that is not named looks at itself only. Keys are one-hot, so the
    query simply holds its logits. V is all ones.
    """
    Q = np.full((heads, n, n), NEVER)
    for h in range(heads):
        for i in range(n):
            for j, weight in rows.get((h, i), {i: 1.0}).items():
                Q[h, i, j] = math.log(weight)
    K = np.array([np.eye(n) for _ in range(key_heads)])
    return Q, K, np.ones((key_heads, n, 2))


def noise(seed, n, heads=4, key_heads=2, d=8):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(heads, n, d)), rng.normal(size=(key_heads, n, d)), rng.normal(size=(key_heads, n, d))


# ---------------------------------------------------------------- common


def test_attention_of_zero_queries_is_uniform_over_the_past():
    a = common.attention(np.zeros((2, 4, 3)), np.ones((1, 4, 3)), rows=2)
    assert a.shape == (2, 2, 4)
    assert np.allclose(a[1], [[1 / 3, 1 / 3, 1 / 3, 0], [1 / 4] * 4])


def test_attention_by_hand_and_head_grouping():
    Q, K = np.array([[[2.0]], [[0.0]], [[1.0]], [[3.0]]]), np.array([[[1.0]], [[1.0]]])
    Q, K = np.repeat(Q, 2, axis=1), np.repeat(K, 2, axis=1)
    K[0, 0], K[1, 0] = 0.0, 5.0  # KV head 0: keys 0 and 1; KV head 1: keys 5 and 1
    a = common.attention(Q, K, scale=0.5, rows=1)[:, 0]
    assert np.allclose(a[0], [1 / (1 + math.e), math.e / (1 + math.e)])  # logits 0, 1
    assert np.allclose(a[1], [0.5, 0.5])
    assert np.allclose(a[2, 0] / a[2, 1], math.exp(0.5 * (5 - 1)))  # query head 2 reads KV head 1
    assert np.allclose(a[3, 0] / a[3, 1], math.exp(1.5 * (5 - 1)))
    assert common.group_mean(a, 2)[0] == pytest.approx((a[0] + a[1]) / 2)


def test_default_scale_is_one_over_root_d():
    Q, K = np.ones((1, 2, 4)), np.ones((1, 2, 4))
    K[0, 0] = 0.0  # logits 0 and 4/2
    assert common.attention(Q, K)[0, 1, 1] == pytest.approx(math.exp(2) / (1 + math.exp(2)))


def test_attention_with_positions_sees_only_what_is_not_later():
    a = common.attention(np.zeros((1, 3, 1)), np.zeros((1, 2, 1)), qpos=[1, 4, 9], kpos=[[2, 7]])
    assert a[0].tolist() == [[0, 0], [1, 0], [0.5, 0.5]]


def test_pooling():
    assert common.pool1d([6, 0, 0, 3], 3).tolist() == [3, 2, 1, 1.5]
    assert common.pool1d([6, 0, 0, 3], 3, "max").tolist() == [6, 6, 3, 3]
    assert common.pool1d([5, 7], 5).tolist() == [6, 6]
    assert common.pool1d([5, 7], 1).tolist() == [5, 7]


def test_top_gives_ties_to_the_later_token():
    assert common.top([1, 3, 3, 3, 0], 2) == [2, 3]
    assert common.top([0, 0, 0], 1) == [2]
    assert common.top([5, 1, 2], 2) == [0, 2]
    assert common.top([5, 1, 2], 0) == []


def test_kept_window_shrinks_to_half_the_budget():
    assert common.kept_window(64, 100, 500) == (50, 50)
    assert common.kept_window(8, 100, 500) == (8, 8)
    assert common.kept_window(64, 1, 500) == (1, 0)


def test_take_units():
    units, scores, tokens = [0, 0, 0, 1, 1, 2], [9, 9, 5], [1, 3, 1, 0, 0, 7]
    assert common.take_units(units, scores, tokens, 2) == [3, 4]  # tie: the later unit
    assert common.take_units(units, scores, tokens, 4) == [1, 2, 3, 4]  # unit 0 is cut: token 1, then 2 before 0
    assert common.take_units(units, scores, tokens, 3, forced=[5]) == [3, 4, 5]
    assert common.take_units(units, scores, tokens, 4, forced=[3, 5]) == [1, 3, 4, 5]  # unit 1 costs 1, unit 0 is cut
    assert common.take_units([None, 0, 0, None], [1], [9, 1, 2, 9], 1) == [2]


# ---------------------------------------------------------------- no scores


def test_full_streaming_lm_infinite():
    Q, K, V = noise(0, 20)
    assert oracle_full(Q, K, V) == [list(range(20))] * 2
    assert oracle_streamingllm(Q, K, V, 6) == [[0, 1, 2, 3, 18, 19]] * 2
    assert oracle_streamingllm(Q, K, V, 3, sinks=1) == [[0, 18, 19]] * 2
    assert oracle_lm_infinite(Q, K, V, 12) == [[*range(10), 18, 19]] * 2


@pytest.mark.parametrize(
    "oracle",
    [
        oracle_streamingllm,
        oracle_lm_infinite,
        oracle_snapkv,
        oracle_chunkkv,
        oracle_tova,
        oracle_h2o,
        oracle_intentkv,
        oracle_intelllm,
        oracle_ahakv,
        oracle_satkv,
        lambda *a: oracle_protokv(*a, **dict(zip("Wb", random_features(8), strict=True))),
    ],
)
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 20, 38, 39, 40, 50])
def test_every_oracle_spends_the_budget_exactly(oracle, budget):
    kept = oracle(*noise(1, 39), budget)
    assert len(kept) == 2
    for tokens in kept:
        assert tokens == sorted(set(tokens)) and set(tokens) <= set(range(39))
        assert len(tokens) == min(budget, 39)


# ---------------------------------------------------------------- snapkv and relatives


def test_snapkv_by_hand():
    # n = 8, B = 4: the window shrinks to 2 (tokens 6, 7) and both vote.
    Q, K, V = scene({(0, 6): {1: 0.5, 4: 0.5}, (0, 7): {1: 0.3, 3: 0.7}}, 8)
    scores = scores_snapkv(Q, K, V, 4, scale=1.0, pool=1)[0]
    assert np.allclose(scores[:6], [0, 0.8, 0, 0.7, 0.5, 0]) and np.all(np.isinf(scores[6:]))
    assert oracle_snapkv(Q, K, V, 4, scale=1.0, pool=1) == [[1, 3, 6, 7]]
    # average of 3, candidates only: token 5 averages tokens 4 and 5, never the window
    assert np.allclose(scores_snapkv(Q, K, V, 4, scale=1.0, pool=3)[0, :6], [0.4, 0.8 / 3, 0.5, 0.4, 0.4, 0.25])
    # maximum of 3: [.8, .8, .8, .7, .7, .5], the later of the equals
    assert oracle_snapkv(Q, K, V, 4, scale=1.0, pool=3, kind="max") == [[1, 2, 6, 7]]


def test_snapkv_small_budgets():
    Q, K, V = scene({(0, 6): {1: 1.0}, (0, 7): {2: 0.6, 7: 0.4}}, 8)
    assert oracle_snapkv(Q, K, V, 3, scale=1.0, pool=1) == [[2, 6, 7]]  # only token 7 votes; of the zeros, token 6
    assert oracle_snapkv(Q, K, V, 2, scale=1.0, pool=1) == [[2, 7]]
    assert oracle_snapkv(Q, K, V, 1, scale=1.0, pool=1) == [[2]]  # the last query votes, nothing is forced


def test_snapkv_averages_the_group_before_max_pooling():
    Q, K, V = scene({(0, 5): {0: 1.0}, (1, 5): {2: 1.0}}, 6, heads=2)
    assert np.allclose(scores_snapkv(Q, K, V, 2, scale=1.0, pool=3, kind="max")[0, :5], [0.5, 0.5, 0.5, 0.5, 0])
    assert oracle_snapkv(Q, K, V, 2, scale=1.0, pool=3, kind="max") == [[3, 5]]


def test_snapkv_heads_choose_for_themselves():
    Q, K, V = scene({(0, 5): {0: 1.0}, (1, 5): {2: 1.0}}, 6, heads=2, key_heads=2)
    assert oracle_snapkv(Q, K, V, 2, scale=1.0, pool=1) == [[0, 5], [2, 5]]


def test_chunkkv_ranks_chunks_by_sum():
    # candidates 0..5 in chunks {0..3} (sum 1, mean .25) and {4, 5} (sum .6, mean .3)
    Q, K, V = scene({(0, 6): {0: 0.5, 1: 0.5}, (0, 7): {4: 0.6, 7: 0.4}}, 8)
    assert oracle_chunkkv(Q, K, V, 4, scale=1.0, chunk=4) == [[0, 1, 6, 7]]
    assert oracle_chunkkv(Q, K, V, 5, scale=1.0, chunk=4) == [[0, 1, 3, 6, 7]]  # cut to three, ties to the later


def test_tova_makes_one_choice_for_all_heads():
    Q, K, V = scene({(0, 4): {0: 0.7, 4: 0.3}, (1, 4): {1: 0.5, 4: 0.5}}, 5, heads=2, key_heads=2)
    assert np.allclose(scores_tova(Q, K, V, scale=1.0), [[0.35, 0.25, 0, 0, 0.4]] * 2)
    assert oracle_tova(Q, K, V, 2, scale=1.0) == [[0, 4], [0, 4]]


def test_h2o_accumulates_over_all_queries():
    # every token looks at itself, but 2 looks at 0, and 4 half at 1
    Q, K, V = scene({(0, 2): {0: 1.0}, (0, 4): {1: 0.5, 4: 0.5}}, 6)
    assert np.allclose(scores_h2o(Q, K, V, 2, scale=1.0)[0, :5], [2, 1.5, 0, 1, 0.5])
    assert oracle_h2o(Q, K, V, 2, scale=1.0) == [[0, 5]]
    assert oracle_h2o(Q, K, V, 3, scale=1.0) == [[0, 1, 5]]  # one recent, two heavy
    assert oracle_h2o(Q, K, V, 4, scale=1.0) == [[0, 1, 4, 5]]
    assert oracle_h2o(Q, K, V, 5, scale=1.0) == [[0, 1, 3, 4, 5]]


# ---------------------------------------------------------------- intentkv


def context_then_question(heads=1):
    """n = 8; of the last four queries the first two look at token 0, the last two at token 4."""
    rows = {(0, 4): {0: 1.0}, (0, 5): {0: 1.0}, (0, 6): {4: 1.0}, (0, 7): {4: 1.0}}
    rows.update({(1, i): {2: 1.0} for i in range(4, 8)})  # a second head, if any, looks at token 2 all along
    return scene(rows, 8, heads=heads)


def test_jsd():
    assert jsd([1, 0], [0, 1]) == pytest.approx(math.log(2))
    assert jsd([0.5, 0.5], [1, 0]) == pytest.approx(0.2157616)
    assert jsd([0.3, 0.7], [0.3, 0.7]) == 0


def test_intention_starts_at_the_row_before_the_jump():
    a, b, c = [1.0, 0, 0], [0, 1.0, 0], [0, 0.5, 0.5]
    assert intention_start(np.array([a, a, b, b]), smooth=1) == 1  # j = 0, 0, √ln2, √ln2
    assert intention_start(np.array([a, b, b, b]), smooth=1) == 0
    assert intention_start(np.array([a, a, a, b]), smooth=1) == 2
    assert intention_start(np.array([a, a, a, a]), smooth=1) == 0  # no jump: the whole window
    assert intention_start(np.array([b, a, a, c]), smooth=1) == 0  # the jump down later does not count
    assert intention_start(np.array([a]), smooth=8) == 0
    # smooth = 2: rows a, (a+b)/2, b, b; j = 0, .4645, .8326, .8326: the first jump is the biggest
    assert intention_start(np.array([a, a, b, b]), smooth=2) == 0


def test_intention_by_subsequent_rows():
    a, b, c, h = [1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0.5, 0.5, 0]

    def start(rows, smooth=1):
        return intention_start(np.array(rows), smooth, "subsequent")

    assert start([a, a, b, b]) == 1  # d = 0, √ln2, 0
    assert start([a, b, c, c]) == 0  # √ln2 twice: the first of equals
    assert start([a, h, b, b]) == 0  # √.2158 twice
    # against the first row: j = 0, √.2158, √ln2, √ln2, so the steps .46 and .37, then none: row 0, as before
    assert intention_start(np.array([a, h, c, b]), 1) == 0
    # one after another: a-h √.2158 = .46, h-c √ln2 = .83, c-b √ln2: row 1
    assert start([a, h, c, b]) == 1
    assert start([b, a, a, h, c]) == 0 and start([h, b, b, a, a]) == 2  # .46, 0, .83, 0
    # smooth = 2: a, h, b (no short end): .46 twice
    assert start([a, a, b, b], 2) == 0
    # smooth = 2: a, a, h, b: 0, .46, .46
    assert start([a, a, a, b, b], 2) == 1
    # smooth = 3: two rows a, (2a + b)/3; smooth = 4: one row; smooth = 5: none
    assert start([a, a, a, b], 3) == 0 and start([a, a, a, b], 4) == 0 and start([a, a, a, b], 5) == 0


def test_a_short_end_is_not_pooled_in_subsequent_rows():
    a, b, c = [1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]
    rows = np.array([a, a, a, a, c])
    # smooth = 2: a, a, a, (a+c)/2: the only step is 2 -> 3; a short end c would add an equal step later
    assert intention_start(rows, 2, "subsequent") == 2
    # smooth = 3: a, a, (2a+c)/3: step 1 -> 2; with short ends (a+c)/2 and c, the biggest step would be the last, 3
    assert intention_start(rows, 3, "subsequent") == 1
    assert intention_start(np.array([a, a, a, b]), 3, "subsequent") == 0  # steps of the short ends lie at 1 and 2


def test_a_step_below_a_millionth_is_none():
    p = np.array([[0.5, 0.5]] * 3)
    p[2] += [1e-6, -1e-6]  # √JSD ≈ 1e-6·√(1/2): too small
    assert intention_start(p, 1, "subsequent") == 0
    p[2] += [1e-4, -1e-4]
    assert intention_start(p, 1, "subsequent") == 1


def test_intentkv_votes_by_subsequent_rows():
    # of the last five queries: {0: .5, 1: .5}, {0: 1}, then 2 for good: rows h, a, c, c, c: row 1 before the big step
    rows = {(0, 3): {0: 0.5, 1: 0.5}, (0, 4): {0: 1.0}, **{(0, i): {2: 1.0} for i in (5, 6, 7)}}
    Q, K, V = scene(rows, 8)
    args = dict(scale=1.0, window=5, smooth=1)
    assert np.allclose(votes_intentkv(Q, K, boundary="subsequent", **args), [[1 / 4, 0, 3 / 4, 0, 0, 0, 0, 0]])
    # first: j = 0, √.2158, √ln2, so the first increase, .46, is the biggest and row 0 counts
    assert np.allclose(votes_intentkv(Q, K, **args), [[1.5 / 5, 0.5 / 5, 3 / 5, 0, 0, 0, 0, 0]])
    assert oracle_intentkv(Q, K, V, 3, block=1, boundary="subsequent", **args) == [[0, 2, 7]]
    assert oracle_intentkv(Q, K, V, 3, block=1, **args) == [[0, 1, 2]]


def test_intentkv_votes_and_blocks():
    Q, K, V = context_then_question()
    args = dict(scale=1.0, window=4, smooth=1)
    assert np.allclose(votes_intentkv(Q, K, **args), [[1 / 3, 0, 0, 0, 2 / 3, 0, 0, 0]])
    assert np.allclose(votes_intentkv(Q, K, intention=False, **args), [[1 / 2, 0, 0, 0, 1 / 2, 0, 0, 0]])
    assert np.allclose(scores_intentkv(Q, K, V, 3, recent=1, **args)[0, :7], [1 / 3, 0, 0, 0, 2 / 3, 0, 0])
    assert oracle_intentkv(Q, K, V, 2, block=2, **args) == [[4, 5]]
    assert oracle_intentkv(Q, K, V, 3, block=2, **args) == [[0, 4, 5]]  # the next block is cut to token 0
    assert oracle_intentkv(Q, K, V, 3, block=1, **args) == [[0, 4, 7]]  # of the zeros the latest
    assert oracle_intentkv(Q, K, V, 1, block=2, **args) == [[4]]


def test_intentkv_averages_the_group_after_each_heads_own_intention():
    Q, K, _ = context_then_question(heads=2)
    votes = votes_intentkv(Q, K, scale=1.0, window=4, smooth=1)
    assert np.allclose(votes, [[1 / 6, 0, 1 / 2, 0, 1 / 3, 0, 0, 0]])


def test_intentkv_sinks_and_recent_leave_the_competition():
    Q, K, V = context_then_question()
    args = dict(scale=1.0, window=4, smooth=1, block=2, sinks=1, recent=1)
    assert oracle_intentkv(Q, K, V, 4, **args) == [[0, 4, 5, 7]]
    assert oracle_intentkv(Q, K, V, 5, **args) == [[0, 4, 5, 6, 7]]  # zeros tie: the last block, costing only token 6
    assert oracle_intentkv(Q, K, V, 2, **args) == [[0, 7]]


def test_intentkv_short_last_block_leaves_room():
    Q, K, V = scene({(0, 4): {0: 0.2, 1: 0.1, 2: 0.2, 4: 0.5}}, 5)
    assert oracle_intentkv(Q, K, V, 4, scale=1.0, window=1, block=2) == [[0, 1, 2, 4]]
    assert oracle_intentkv(Q, K, V, 2, scale=1.0, window=1, block=2) == [[0, 4]]


# ---------------------------------------------------------------- intelllm


def test_intelllm_global_and_local():
    # B = 4: near window {6, 7}, two compressed; head gravity {0, 1}
    Q, K, V = scene({(0, 6): {0: 0.5, 2: 0.25, 6: 0.25}, (0, 7): {3: 0.1, 4: 0.1, 7: 0.8}}, 8)
    args = dict(scale=1.0, head_gravity=2, window=2)
    # tail masked first: row 6 is 2/3 on token 0 and 1/3 on 2; row 7 is 1/2 on 3 and on 4; then the head is zeroed
    assert np.allclose(scores_intelllm(Q, K, V, 4, keep_head=False, **args)[0, :6], [0, 0, 1 / 3, 0.5, 0.5, 0])
    assert oracle_intelllm(Q, K, V, 4, keep_head=False, **args) == [[3, 4, 6, 7]]
    # head masked first: row 6 is 1/2 on 2 and on 6; row 7 is unchanged; then the tail is zeroed
    local = dict(args, mode="local", keep_head=False)
    assert np.allclose(scores_intelllm(Q, K, V, 4, **local)[0, :6], [0, 0, 0.5, 0.1, 0.1, 0])
    assert oracle_intelllm(Q, K, V, 4, **local) == [[2, 4, 6, 7]]
    assert oracle_intelllm(Q, K, V, 4, **args) == [[0, 1, 6, 7]]  # keep_head fills the compression window
    assert oracle_intelllm(Q, K, V, 4, scale=1.0, head_gravity=1, window=2) == [[0, 4, 6, 7]]
    assert oracle_intelllm(Q, K, V, 3, near=1, keep_head=False, **args) == [[3, 4, 7]]
    assert oracle_intelllm(Q, K, V, 7, keep_head=False, **args) == [[1, 2, 3, 4, 5, 6, 7]]  # a head token, at the last


def test_intelllm_placement():
    kept = [0, 5, 9, 97, 98, 99]
    assert placement_intelllm(kept, 100, 3, 50) == [88, 89, 90, 97, 98, 99]  # gap 9
    assert placement_intelllm(kept, 100, 3, 50, gap=3) == [94, 95, 96, 97, 98, 99]  # no gap
    assert placement_intelllm(kept, 100, 3, 50, gap=47)[0] == 99 - 49  # the farthest key is W-1 behind
    with pytest.raises(ValueError):
        placement_intelllm(kept, 100, 3, 50, gap=48)
    assert placement_intelllm([0, 1, 2], 3, 1, 50) == [0, 1, 2]
    assert placement_intelllm([0, 8, 9], 10, 1, 50) == [5, 6, 9]  # gap 3
    assert placement_intelllm([0, 8, 9], 10, 1, 50, gap=25) == [-17, -16, 9]  # below zero is fine for a rotation


def test_intelllm_default_gap():
    assert default_gap(3, 3, 50, 100) == 9  # 3·near
    assert default_gap(3, 3, 7, 100) == 4  # W - far
    assert default_gap(3, 3, 50, 8) == 5  # n - far
    assert default_gap(6, 4, 50, 9) == 4 and default_gap(6, 4, 8, 99) == 4  # never inside the near window
    # n - far is where the first far token ends when the text is short: position 0, never before it
    assert placement_intelllm([0, 1, 2, 5, 6, 7], 8, 3, 50) == [0, 1, 2, 5, 6, 7]
    assert placement_intelllm([1, 2, 4, 5, 6, 7], 8, 3, 50) == [0, 1, 2, 5, 6, 7]


# ---------------------------------------------------------------- ahakv


def test_ahakv_gain():
    assert gain(8, 4, 16, 0.25) == pytest.approx(math.sqrt(2 * math.log(2) / 16))
    assert gain(4, 4, 16, 0.25) == 0.25
    assert gain(3, 4, 16, 0.25) == 0.25
    assert gain(8, 4, 16, 0.3, "multiply") == pytest.approx(0.3 * math.sqrt(2 * math.log(2)) / 4)
    assert gain(4, 4, 16, 0.3, "multiply") == 0.3


def test_ahakv_value_prior():
    values = np.array([[1.0, 0], [0, 0], [0, 0], [2, 2]])  # squared norms 1, 0, 0, 8
    assert np.allclose(value_prior_of(values, 3), [0.125, 1 / 12, 2 / 3, 1])
    assert np.allclose(value_prior_of(values, 1), [0.125, 0, 0, 1])
    assert np.allclose(value_prior_of(np.zeros((3, 2)), 3), 1)


def test_ahakv_value_prior_and_pool_decide():
    Q, K, V = scene({(0, 5): {0: 0.5, 3: 0.3, 5: 0.2}}, 6)
    V[0, 3] = 2.0  # squared norm 8 against 2: γ̄ = 1 against 1/4
    args = dict(scale=1.0, pool=1, value_pool=1, step_gain=False)
    assert np.allclose(scores_ahakv(Q, K, V, 2, **args)[0, :5], [0.125, 0, 0, 0.3, 0])
    assert oracle_ahakv(Q, K, V, 2, **args) == [[3, 5]]
    assert oracle_ahakv(Q, K, V, 2, value_prior=False, **args) == [[0, 5]]


def test_ahakv_pools_over_all_tokens():
    Q, K, V = scene({(0, 5): {1: 0.3, 5: 0.7}}, 6)
    # average of 3 lets the recent token's .7 spill over to token 4; SnapKV pools the candidates alone
    assert oracle_ahakv(Q, K, V, 2, scale=1.0, pool=3, value_pool=1, step_gain=False) == [[4, 5]]
    assert oracle_snapkv(Q, K, V, 2, scale=1.0, pool=3) == [[0, 5]]


def test_ahakv_step_gain_by_hand():
    # n = 8, B = 2, one voter that has seen 8 tokens: λ = sqrt(2 ln 4 / d), d = 2
    Q, K, V = np.zeros((1, 8, 2)), np.zeros((1, 8, 2)), np.ones((1, 8, 2))
    Q[0, 7, 0], K[0, 0, 0] = 2.0, 1.0
    scores = scores_ahakv(Q, K, V, 2, pool=1)[0]
    assert scores[0] / scores[1] == pytest.approx(math.exp(2 * math.sqrt(math.log(4))))
    plain = scores_ahakv(Q, K, V, 2, pool=1, step_gain=False)[0]
    assert plain[0] / plain[1] == pytest.approx(math.exp(2 / math.sqrt(2)))


def test_ahakv_gain_on_top_of_the_scale():
    # as above: λ/√d = sqrt(2 ln 4 / 2)/√2 times q·k = 2
    Q, K, V = np.zeros((1, 8, 2)), np.zeros((1, 8, 2)), np.ones((1, 8, 2))
    Q[0, 7, 0], K[0, 0, 0] = 2.0, 1.0
    scores = scores_ahakv(Q, K, V, 2, pool=1, gain="multiply")[0]
    assert scores[0] / scores[1] == pytest.approx(math.exp(2 * math.sqrt(math.log(4) / 2)))


def test_ahakv_of_all_rows():
    # every token looks at itself, but 1 and 2 look at 0 and 3 at 1; B = 2, one recent row (token 5: itself)
    Q, K, V = scene({(0, 1): {0: 1.0}, (0, 2): {0: 1.0}, (0, 3): {1: 1.0}}, 6)
    V[0, 1] = 2.0  # squared norm 8 against 2: γ̄ = 1 against 1/4
    args = dict(scale=1.0, pool=1, value_pool=1, step_gain=False)
    assert np.allclose(scores_ahakv(Q, K, V, 2, recent_only=False, **args)[0, :5], [0.75, 1, 0, 0, 0.25])
    assert np.allclose(scores_ahakv(Q, K, V, 2, **args)[0, :5], 0)
    assert oracle_ahakv(Q, K, V, 2, recent_only=False, **args) == [[1, 5]]
    assert oracle_ahakv(Q, K, V, 2, recent_only=False, value_prior=False, **args) == [[0, 5]]


def test_ahakv_rows_within_the_budget_use_the_ordinary_scale():
    # n = 5, B = 4: two voters, having seen 4 tokens (ordinary scale) and 5 (gain)
    Q, K, V = np.zeros((1, 5, 2)), np.zeros((1, 5, 2)), np.ones((1, 5, 2))
    Q[0, 3, 0], Q[0, 4, 0], K[0, 0, 0] = 1.0, 1.0, 1.0
    e4, e5 = math.exp(1 / math.sqrt(2)), math.exp(math.sqrt(math.log(5 / 4)))
    assert scores_ahakv(Q, K, V, 4, pool=1)[0, 0] == pytest.approx(e4 / (e4 + 3) + e5 / (e5 + 4))


# ---------------------------------------------------------------- protokv and satkv

SIX = np.array([[1, 0], [1, 0.1], [0, -1], [1, 0], [0.1, 1], [0, 1.0]])  # token 2 is the outlier
W2, B2 = np.eye(2), np.zeros(2)


def test_neighbour_similarity_and_outlier_degree():
    keys = np.array([[1, 0], [2, 0], [0, 1], [1.0, 0]])
    assert np.allclose(neighbour_similarity(keys, 1), [1, 2 / 3, 1 / 3, 1 / 2])
    theta = outlier_degree(keys, 1)
    assert common.top(theta, 1) == [2] and common.top(theta, 2) == [2, 3] and common.top(theta, 3) == [1, 2, 3]
    assert theta.mean() == pytest.approx(0) and theta.std() == pytest.approx(1)
    assert outlier_degree(np.ones((4, 1)), 1).tolist() == [0] * 4
    assert neighbour_similarity(np.zeros((3, 2)), 1).tolist() == [0] * 3  # the zero vector is like nothing


def test_satkv():
    keys = np.array([[[1, 0], [1, 0], [0, 1], [1, 0], [1, 0], [1.0, 0]]])
    assert oracle_satkv(None, keys, None, 2, kappa=1, window=1) == [[2, 5]]
    assert oracle_satkv(None, keys, None, 2, kappa=1) == [[2, 5]]  # 8 shrinks to B//2
    assert oracle_satkv(None, keys, None, 4, kappa=1) == [[2, 3, 4, 5]]  # neighbours 1 and 3 tie


def test_buckets_and_ranges():
    pi = math.pi
    assert [bucket_of(np.array(k), W2, B2) for k in ([0, 0], [pi, 0], [0, pi], [pi, pi])] == [3, 2, 1, 0]
    corners = [np.array(k) for k in ([0, 0], [pi, 0], [0, pi], [pi, pi])]
    assert [bucket_of(k, W2, B2, buckets=3) for k in corners] == [0, 2, 1, 0]  # 3, 2, 1, 0 mod 3
    assert [bucket_of(k, W2, B2, buckets=9) for k in corners] == [3, 2, 1, 0]
    # 3i//10 = 0 0 0 0 1 1 1 2 2 2; 4i//6 = 0 0 1 2 2 3
    assert ranges_of(10, 3) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert ranges_of(6, 4) == [[0, 1], [2], [3, 4], [5]]
    assert ranges_of(3, 500) == [[0], [1], [2]]


def test_ranges_by_the_second_formula():
    # Range r begins at the first i with i·v >= r·n, that is ceil(r·n/v).
    for n in (1, 15, 16, 17, 100, 900, 9000):
        v = chunk_count(n)
        starts = [-(-r * n // v) for r in range(v + 1)]
        assert ranges_of(n) == [list(range(a, b)) for a, b in pairwise(starts)]


def test_protokv_counts():
    assert [chunk_count(n) for n in (1, 15, 16, 31, 32, 7999, 8000, 99999)] == [1, 1, 1, 1, 2, 499, 500, 500]
    assert [chunk_count(n, 500) for n in (1, 499, 501)] == [1, 499, 500]
    assert lsh_size(100) == (4 + 6, 4)  # u = 4, v = 6
    assert lsh_size(64) == (8, 3) and lsh_size(80) == (9, 4)  # a power of two and one more
    assert lsh_size(100, bits=3, chunks=20) == (28, 5)
    assert lsh_size(100, buckets=2, chunks=6) == (8, 3)


def test_cluster_worth():
    s, cluster = [1.0, 2.0, 6.0, -1.0, 3.0], [7, 2, 7, 2, 5]
    assert cluster_worth(s, cluster).tolist() == [3.5, 0.5, 3.5, 0.5, 3]
    assert cluster_worth(s, cluster, "sum").tolist() == [7, 1, 7, 1, 3]


def test_protokv_clusters():
    # anchor: token 2, prototype (0, -1), bits cos 0 > 0 and cos 1 > 0: bucket 3 of 4
    # ranges (without 2) {0, 1} -> (1, .05) and {3, 4, 5} -> (.37, .67) are numbered 4 and 5
    assert clusters_of(SIX, W2, B2, kappa=1, anchors=1, chunks=2) == [4, 4, 3, 4, 5, 5]
    assert clusters_of(SIX, W2, B2, kappa=1, anchors=1, chunks=2, buckets=2) == [2, 2, 1, 2, 3, 3]  # 3 mod 2
    assert clusters_of(SIX, W2, B2, kappa=1, anchors=1) == [4, 4, 3, 4, 4, 4]  # one range, (.62, .42): never below 0
    # without anchors: {0, 1, 2} -> (.67, -.3), {3, 4, 5} -> (.37, .67)
    assert clusters_of(SIX, W2, B2, kappa=1, chunks=2, prototypes="chunks") == [0, 0, 0, 0, 1, 1]


def test_protokv_lsh_has_as_many_clusters_as_the_original():
    # u + v = 4 + 2 = 6: three bits. Bits of a key (x, y): cos x > 0, cos y > 0, cos(x + y) > 0, weights 1, 2, 4.
    W, b = np.array([[1, 0], [0, 1], [1, 1.0]]), np.zeros(3)
    far = SIX * math.pi  # (π, 0) 010; (π, .3) 010; (0, -π) 001; (π, 0) 010; (.3, π) 001; (0, π) 001
    lsh = dict(chunks=2, prototypes="lsh")
    assert clusters_of(far, W, b, **lsh) == [2, 2, 1, 2, 1, 1]
    assert clusters_of(SIX * 0.0, W, b, **lsh) == [7 % 6] * 6  # 111
    assert clusters_of(SIX * 0.0, W, b, **lsh, buckets=6) == [7] * 6  # 6 + 2 clusters: 7 is one of them
    # opposite keys share bucket 1, so its mean is (.1, 1)π/3 and token 2, opposite to it, joins bucket 2: (1, .03)π
    assert clusters_of(far, W, b, **lsh, lsh_join="cosine") == [2, 2, 2, 2, 1, 1]
    with pytest.raises(AssertionError):
        clusters_of(far, W2, B2, **lsh)  # two bits are too few


def test_protokv_by_hand():
    Q = np.zeros((1, 6, 2))
    Q[0, 5] = [1, -3]  # s = 1, .7, 3, 1, -2.9, -3; clusters {2}: 3, {0, 1, 3}: .9, {4, 5}: -2.95
    K, V = SIX[None], np.ones((1, 6, 2))
    args = dict(W=W2, b=B2, kappa=1, anchors=1, chunks=2, window=1)
    assert np.allclose(votes_protokv(Q, K, 1), [[1, 0.7, 3, 1, -2.9, -3]])
    assert oracle_protokv(Q, K, V, 2, **args) == [[2, 5]]
    assert oracle_protokv(Q, K, V, 3, **args) == [[2, 3, 5]]  # inside the cluster 0 and 3 tie: the later
    assert oracle_protokv(Q, K, V, 4, **args) == [[0, 2, 3, 5]]
    assert oracle_protokv(Q, K, V, 5, **args) == [[0, 1, 2, 3, 5]]
    assert oracle_protokv(Q, K, V, 1, **args) == [[2]]
    assert np.allclose(scores_protokv(Q, K, V, 2, **args)[0, :5], [0.9, 0.9, 3, 0.9, -2.95])
    assert np.allclose(scores_protokv(Q, K, V, 2, worth="sum", **args)[0, :5], [2.7, 2.7, 3, 2.7, -5.9])


def test_protokv_sum_prefers_the_large_cluster():
    Q, K, V = np.zeros((1, 6, 2)), SIX[None], np.ones((1, 6, 2))
    Q[0, 5] = [1, -2]  # s = 1, .8, 2, 1, -1.9, -2: cluster {2} 2, {0, 1, 3} mean .93, sum 2.8
    args = dict(W=W2, b=B2, kappa=1, anchors=1, chunks=2, window=1)
    assert oracle_protokv(Q, K, V, 2, **args) == [[2, 5]]
    assert oracle_protokv(Q, K, V, 2, worth="sum", **args) == [[3, 5]]
    assert oracle_protokv(Q, K, V, 4, worth="sum", **args) == [[0, 1, 3, 5]]


def test_protokv_softmax_votes_are_attention():
    Q, K, _ = noise(3, 30)
    assert np.allclose(votes_protokv(Q, K, 4, "softmax"), common.window_votes(Q, K, 4))
    assert votes_protokv(Q, K, 4, "softmax").sum() == pytest.approx(2 * 4)


@pytest.mark.parametrize("votes", ["raw", "softmax"])
def test_protokv_equals_the_unit_rule(votes):
    Q, K, V = noise(4, 90)
    W, b = random_features(8, seed=1)
    kept = oracle_protokv(Q, K, V, 30, W=W, b=b, anchors=10, chunks=12, votes=votes)
    s = votes_protokv(Q, K, 8, votes)
    for h in range(2):
        cluster = clusters_of(K[h], W, b, anchors=10, chunks=12)
        mean = {c: np.mean([s[h, j] for j in range(90) if cluster[j] == c]) for c in set(cluster)}
        assert kept[h] == common.take_units(cluster, mean, s[h], 30, range(82, 90))


# ---------------------------------------------------------------- allocation


def test_pyramid():
    assert pyramid(12, 3, 100, 2, beta=5) == [20, 12, 4]  # shares 18, 10, 2
    assert pyramid(12, 3, 17, 2, beta=5) == [17, 12, 7]  # capped at the 17 tokens there are
    assert pyramid(12, 4, 100, 2, beta=5) == [20, 15, 9, 4]  # 18, 12.67, 7.33, 2 rounded cumulatively
    assert pyramid(12, 1, 100, 2) == [12]
    assert pyramid(12, 3, 12, 2) == [12, 12, 12] and pyramid(12, 3, 5, 2) == [5, 5, 5]
    for budget in range(9, 60, 7):
        shares = pyramid(budget, 7, 61, 8)
        assert sum(shares) == 7 * budget and max(shares) <= 61 and min(shares) >= 8
        assert all(a >= b - 1 for a, b in pairwise(shares))


def test_adakv():
    scores, forced = [[9, 8, 7, 6, 0], [1, 2, 0.5, 0.1, 0]], [[4], [4]]
    assert adakv(scores, forced, 3, alpha=0.5) == [4, 2]  # one candidate each is sure; 8 and 7 take the rest
    assert adakv(scores, forced, 3, alpha=0.0) == [5, 1]
    assert adakv(scores, forced, 3, alpha=1.0) == [3, 3]
    assert adakv(scores, forced, 5) == [5, 5]
    assert kept_by_quota(scores, forced, [4, 2]) == [[0, 1, 2, 4], [1, 4]]
    assert adakv([[7, 0, 0], [0, 7, 7]], [[], []], 1, alpha=0.0) == [0, 2]  # ties: later tokens first
    assert adakv([[0, 0, 7], [7, 0, 7]], [[], []], 1, alpha=0.0) == [1, 1]  # then the lower head
    assert adakv([[0, 7], [0, 7], [0, 7]], [[0], [0], []], 1, alpha=0.0) == [2, 1, 0]


def test_selection_order():
    units, worth, scores = [0, 0, 1, 1, 2, None], [5, 9, 5], [3, 8, 1, 1, 2, 99]
    assert selection_order(scores, [], units, worth) == [3, 2, 4, 1, 0]  # 0 and 2 tie: the unit that ends later
    assert selection_order(scores, [2, 4], units, worth) == [3, 1, 0]
    assert selection_order([1, 3, 3, 0], [3]) == [2, 1, 0]


def test_adakv_over_units_by_hand():
    # head 0: units {0, 1} worth 4 and {2, 3} worth 1; head 1: {0, 1} worth 2, {2, 3} worth 3; token 4 is forced
    units, worth = [[0, 0, 1, 1, None]] * 2, [[4, 1], [2, 3]]
    scores, forced = [[1, 3, 0.5, 0.5, 0], [9, 8, 1, 2, 0]], [[4], [4]]
    # own orders 1 0 3 2 and 3 2 0 1; the pool 4 4 | 3 3 | 2 2 | 1 1 in pairs of tokens
    for budget, quota in [(2, [3, 1]), (3, [3, 3]), (4, [3, 5])]:
        assert adakv(scores, forced, budget, 0.0, units, worth) == quota
    # tokens' own scores alone would have favoured head 1, whose 9 and 8 lie in its second unit
    assert adakv(scores, forced, 2, 0.0) == [1, 3]
    # alpha = 1/2 of B - 1 = 2: one sure token each (1 and 3), then 4, then 3: one more each
    assert adakv(scores, forced, 3, 0.5, units, worth) == [3, 3]
    assert adakv(scores, forced, 2, 0.5, units, worth) == [3, 1]  # floor(1/2): none is sure
    assert adakv(scores, forced, 2, 1.0, units, worth) == [2, 2]
    # one sure token each (1 and 3), then 4 and 3.5 before head 1's 3
    assert adakv(scores, forced, 3, 0.5, units, [[4, 3.5], [2, 3]]) == [4, 2]
    assert kept_by_quota(scores, forced, [4, 2], units, worth) == [[0, 1, 3, 4], [3, 4]]


def test_adakv_over_units_ties_between_heads():
    units, worth, none = [[0, 0], [0, 0]], [[7], [7]], [[], []]
    assert adakv([[5, 1], [4, 6]], none, 1, 0.0, units, worth) == [1, 1]  # 6 of head 1, then 5 of head 0
    assert adakv([[5, 1], [5.5, 6]], none, 1, 0.0, units, worth) == [0, 2]
    assert adakv([[5, 0], [0, 5]], [[1], []], 1, 0.0, units, worth) == [1, 1]  # one place: the later token, head 1's
    three = dict(units=[[0, 0]] * 3, worth=[[7]] * 3)
    assert adakv([[5, 5], [5, 5], [5, 5]], [[0], [], []], 1, 0.0, **three) == [2, 1, 0]  # two places: lower heads
    assert adakv([[5, 9], [4, 4]], [[1], []], 1, 0.0, units, [[7], [7.5]]) == [1, 1]  # worth goes before scores


@pytest.mark.parametrize("budget", [5, 12, 25])
def test_adakv_over_units_is_a_prefix_of_every_heads_own_choice(budget):
    rng = np.random.default_rng(budget)
    scores, forced = rng.random((3, 30)), [list(range(28, 30))] * 3
    units = [[None if j >= 28 else int(u) for j, u in enumerate(rng.integers(0, 6, 30))] for _ in range(3)]
    worth = rng.random((3, 6)) * [[1], [2], [4]]
    quota = adakv(scores, forced, budget, 0.3, units, worth)
    kept = kept_by_quota(scores, forced, quota, units, worth)
    assert sum(quota) == 3 * budget and quota[2] > quota[0] >= 2 + math.floor(0.3 * (budget - 2))
    for h in range(3):
        assert kept[h] == common.take_units(units[h], worth[h], scores[h], quota[h], forced[h])
    alone = [[[0] * 28 + [None] * 2] * 3, [[1.0]] * 3]  # one unit of equal worth: the tokens' scores decide
    assert adakv(scores, forced, budget, 0.3, *alone) == adakv(scores, forced, budget, 0.3)
    own = [[list(range(30))] * 3, scores]  # every token its own unit
    assert adakv(scores, forced, budget, 0.3, *own) == adakv(scores, forced, budget, 0.3)


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize(
    "oracle",
    [
        oracle_snapkv,
        oracle_chunkkv,
        oracle_tova,
        oracle_h2o,
        oracle_intentkv,
        oracle_streamingllm,
        oracle_lm_infinite,
        oracle_intelllm,
    ],
)
def test_stream_of_one_chunk_is_the_prefill(oracle):
    Q, K, V = noise(5, 50)
    assert stream(oracle, Q, K, V, 20, 50) == oracle(Q, K, V, 20)
    for chunk in (1, 7, 16):
        assert all(len(kept) == 20 and kept == sorted(set(kept)) for kept in stream(oracle, Q, K, V, 20, chunk))


def test_stream_of_sinks_and_recent_is_the_prefill():
    Q, K, V = noise(6, 50)
    assert stream(oracle_streamingllm, Q, K, V, 9, 4) == oracle_streamingllm(Q, K, V, 9)


def test_stream_tova_step_by_step():
    # token 0 is dropped when token 2 looks away from it, so token 3 cannot have it back
    Q, K, V = scene({(0, 2): {0: 0.1, 1: 0.2, 2: 0.7}, (0, 3): {0: 0.9, 1: 0.04, 2: 0.03, 3: 0.03}}, 4)
    assert oracle_tova(Q, K, V, 2, scale=1.0) == [[0, 1]]
    assert stream(oracle_tova, Q, K, V, 2, 1, scale=1.0) == [[1, 3]]


def test_stream_snapkv_by_hand():
    Q, K, V = scene({(0, 2): {0: 0.6, 1: 0.3, 2: 0.1}, (0, 5): {1: 0.9, 2: 0.06, 0: 0.04}}, 6)
    assert oracle_snapkv(Q, K, V, 2, scale=1.0, pool=1) == [[1, 5]]
    assert stream(oracle_snapkv, Q, K, V, 2, 3, scale=1.0, pool=1) == [[2, 5]]  # 0 and 2 survived the first chunk


def test_stream_intentkv_renumbers_the_blocks():
    Q, K, V = scene({(0, 3): {1: 0.6, 2: 0.4}, (0, 5): {0: 0.3, 1: 0.2, 2: 0.1, 5: 0.4}}, 6)
    args = dict(scale=1.0, window=1, block=2)
    assert stream(oracle_intentkv, Q, K, V, 3, 4, **args) == [[0, 1, 5]]
    # first chunk: {0, 1}, then 2 (better than 3); then the cache 0 1 | 2 4 | 5 has blocks .5, .1 and .4
    assert stream(oracle_intentkv, Q, K, V, 2, 4, **args) == [[0, 1]]


# ---------------------------------------------------------------- sampling

EIGHTHS = np.log([4, 1, 2, 1.0])  # probabilities 1/2, 1/8, 1/4, 1/8


def test_sampling_temperature():
    assert sampling_probabilities(EIGHTHS) == pytest.approx([1 / 2, 1 / 8, 1 / 4, 1 / 8])
    assert sampling_probabilities(EIGHTHS, 0.5) == pytest.approx(np.array([16, 1, 4, 1]) / 22)  # squared
    assert sampling_probabilities(EIGHTHS, 0).tolist() == [1, 0, 0, 0]
    assert sampling_probabilities([1, 3, 3, 2], 0).tolist() == [0, 1, 0, 0]
    assert sampling_probabilities([1000.0, 0, 1000], 0.1).tolist() == [0.5, 0, 0.5]


def test_sampling_top_k():
    assert sampling_probabilities(EIGHTHS, top_k=1).tolist() == [1, 0, 0, 0]
    assert sampling_probabilities(EIGHTHS, top_k=2) == pytest.approx([2 / 3, 0, 1 / 3, 0])
    assert sampling_probabilities(EIGHTHS, top_k=3) == pytest.approx([1 / 2, 1 / 8, 1 / 4, 1 / 8])  # two are third
    for off in (None, 0, 4, 99):
        assert sampling_probabilities(EIGHTHS, top_k=off) == pytest.approx([1 / 2, 1 / 8, 1 / 4, 1 / 8])


def test_sampling_top_p():
    assert sampling_probabilities(EIGHTHS, top_p=0.4).tolist() == [1, 0, 0, 0]
    assert sampling_probabilities([7, 7], top_p=0.5).tolist() == [0, 1]  # 1/2 is reached exactly
    assert sampling_probabilities(EIGHTHS, top_p=0.51) == pytest.approx([2 / 3, 0, 1 / 3, 0])
    assert sampling_probabilities(EIGHTHS, top_p=0.8) == pytest.approx([4 / 7, 0, 2 / 7, 1 / 7])  # of equals the later
    assert sampling_probabilities(EIGHTHS, top_p=0.9) == pytest.approx([1 / 2, 1 / 8, 1 / 4, 1 / 8])
    assert sampling_probabilities(EIGHTHS, top_p=0.0).tolist() == [1, 0, 0, 0]  # never nobody
    assert sampling_probabilities(EIGHTHS, top_p=1.0) == pytest.approx([1 / 2, 1 / 8, 1 / 4, 1 / 8])


def test_sampling_order_is_temperature_then_k_then_p():
    # after top_k = 2 the shares are 2/3 and 1/3: .6 keeps the first alone; before it, 1/2 would not have been enough
    assert sampling_probabilities(EIGHTHS, top_k=2, top_p=0.6).tolist() == [1, 0, 0, 0]
    assert sampling_probabilities(EIGHTHS, top_p=0.6) == pytest.approx([2 / 3, 0, 1 / 3, 0])
    # temperature 1/2 makes 16/22 = .727 of 1/2: .7 keeps the first alone, temperature 1 both
    assert sampling_probabilities(EIGHTHS, 0.5, top_p=0.7).tolist() == [1, 0, 0, 0]
    assert sampling_probabilities(EIGHTHS, 1.0, top_p=0.7) == pytest.approx([2 / 3, 0, 1 / 3, 0])


def test_sampling_against_the_sum_from_above():
    # a token stays where what is more likely sums to less than top_p: the same rule told from the other end
    logits = np.random.default_rng(0).normal(size=40) * 2
    for temperature, k, p in [(1.0, 12, 0.9), (0.7, 40, 0.5), (2.0, 7, 0.99)]:
        weights = np.exp(logits / temperature)
        weights[weights < np.sort(weights)[-k]] = 0
        weights /= weights.sum()
        weights[[weights[weights > w].sum() >= p for w in weights]] = 0
        assert sampling_probabilities(logits, temperature, k, p) == pytest.approx(weights / weights.sum())
