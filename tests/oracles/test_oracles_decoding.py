"""Checks of the decoding oracles themselves: tiny cases worked out by hand, and what must hold whatever the numbers."""

import math

import numpy as np
import pytest

from oracles import common
from oracles.ahakv import oracle_ahakv
from oracles.decoding import (
    recent_and_best,
    replay_ahakv,
    replay_buffered,
    replay_h2o,
    replay_streaming,
    replay_tova,
    trace_ahakv,
    trace_h2o,
    trace_tova,
)
from oracles.full import oracle_lm_infinite, oracle_streamingllm
from oracles.h2o import oracle_h2o
from oracles.protokv import oracle_protokv, oracle_satkv, random_features, votes_protokv
from oracles.snapkv import oracle_chunkkv, oracle_snapkv
from oracles.streams import stream
from oracles.tova import oracle_tova

NEVER = -1e4  # a logit whose softmax weight is exactly 0


def scene(rows, T, heads=1, key_heads=1):
    """Q, K, V whose attention (scale=1) is what rows[(head, token)] = {key: weight} says, by default itself.

    Keys are one-hot, so a query holds its logits; a key that is not named gets nothing unless no named one is cached.
    """
    Q = np.full((heads, T, T), NEVER)
    for h in range(heads):
        for i in range(T):
            for j, weight in rows.get((h, i), {i: 1.0}).items():
                Q[h, i, j] = math.log(weight)
    return Q, np.array([np.eye(T) for _ in range(key_heads)]), np.ones((key_heads, T, 1))


def noise(seed, T, heads=4, key_heads=2, d=8):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(heads, T, d)), rng.normal(size=(key_heads, T, d)), rng.normal(size=(key_heads, T, d))


def protokv(*args, **options):
    W, b = random_features(8)
    return oracle_protokv(*args, W=W, b=b, **{"anchors": 4, "chunks": 5, **options})


def every_replay(Q, K, V, n, budget):
    """name -> (kept sets, the prefill oracle)."""
    T = K.shape[1]
    return {
        "h2o": (replay_h2o(Q, K, V, n, budget), oracle_h2o),
        "tova": (replay_tova(Q, K, V, n, budget), oracle_tova),
        "ahakv": (replay_ahakv(Q, K, V, n, budget), oracle_ahakv),
        "streaming": (replay_streaming(n, T, budget, 4, key_heads=len(K)), oracle_streamingllm),
        "lm_infinite": (replay_streaming(n, T, budget, 10, key_heads=len(K)), oracle_lm_infinite),
        "snapkv": (replay_buffered(oracle_snapkv, Q, K, V, n, budget, 1), oracle_snapkv),
        "protokv": (replay_buffered(protokv, Q, K, V, n, budget, 1), protokv),
    }


# ---------------------------------------------------------------- the rule of choice


def test_recent_and_best():
    ranked = {0: 5.0, 2: 1.0, 3: 1.0, 7: 0.0, 9: 0.0}
    assert recent_and_best(ranked, 5, 2) == [0, 2, 3, 7, 9]
    assert recent_and_best(ranked, 4, 2) == [0, 3, 7, 9]  # 2 and 3 tie: the later
    assert recent_and_best(ranked, 2, 1) == [0, 9]
    assert recent_and_best(ranked, 2, 0) == [0, 3]
    assert recent_and_best(ranked, 1, 0) == [0]


# ---------------------------------------------------------------- H2O


def test_h2o_by_hand():
    rows = {
        (0, 3): {0: 0.5, 3: 0.5},  # prompt's mass 1.5, 1, 1, 0.5
        (0, 4): {3: 1.0},  # 0 and 3 tie at 1.5: the later stays, 4 is recent
        (0, 5): {4: 1.0},  # 3 has 1.5, 4 has 1
        (0, 6): {5: 0.5, 6: 0.5},  # 3 has 1.5, 5 has 0.5
        (0, 7): {6: 1.0},  # 3 has 1.5, 6 has 0.5 + 1: tie
    }
    Q, K, V = scene(rows, 8)
    assert replay_h2o(Q, K, V, 4, 2, scale=1.0) == [[[0, 3]], [[3, 4]], [[3, 5]], [[3, 6]], [[6, 7]]]
    ranked = [step[0] for _, step in trace_h2o(Q, K, V, 4, 2, scale=1.0)]
    assert ranked[0] == {0: 1.5, 1: 1.0, 2: 1.0, 3: 0.5}
    assert ranked[1] == {0: 1.5, 3: 1.5, 4: 0.0}
    assert ranked[4] == {3: 1.5, 6: 1.5, 7: 0.0}


def test_h2o_looks_at_the_cached_keys_only():
    rows = {(0, 3): {0: 0.5, 3: 0.5}, (0, 4): {1: 0.75, 2: 0.15, 3: 0.1}}  # 1 and 2 are gone: all of it goes to 3
    Q, K, V = scene(rows, 5)
    ranked = [step[0] for _, step in trace_h2o(Q, K, V, 4, 2, scale=1.0)]
    assert ranked[1] == {0: 1.5, 3: 1.5, 4: 0.0}


def test_h2o_mass_is_the_group_mean_and_heads_choose_alone():
    rows = {(0, 2): {0: 1.0}, (1, 2): {1: 1.0}, (2, 2): {1: 1.0}, (3, 2): {1: 1.0}}
    Q, K, V = scene(rows, 3, heads=4, key_heads=2)
    (_, _), (kept, ranked) = trace_h2o(Q, K, V, 2, 2, scale=1.0)
    assert ranked == [{0: 1.5, 1: 1.5, 2: 0.0}, {0: 1.0, 1: 2.0, 2: 0.0}]
    assert kept == [[1, 2], [1, 2]]
    rows[(1, 2)] = {0: 1.0}
    Q, K, V = scene(rows, 3, heads=4, key_heads=2)
    assert replay_h2o(Q, K, V, 2, 2, scale=1.0)[1] == [[0, 2], [1, 2]]


def test_h2o_short_prompt_waits_until_the_cache_is_full():
    Q, K, V = scene({(0, 4): {0: 1.0}}, 5)
    assert replay_h2o(Q, K, V, 2, 4, scale=1.0) == [[[0, 1]], [[0, 1, 2]], [[0, 1, 2, 3]], [[0, 2, 3, 4]]]


@pytest.mark.parametrize("n", [1, 5, 12])
def test_h2o_without_drops_is_the_prefill(n):
    Q, K, V = noise(n, 12)
    *_, (kept, ranked) = trace_h2o(Q, K, V, n, 12)
    votes = common.window_votes(Q, K, 12)
    assert kept == common.everything(K)
    assert np.allclose([[row[j] for j in range(12)] for row in ranked], votes)


@pytest.mark.parametrize("n", [1, 7, 9])
def test_h2o_first_drop_is_the_prefills(n):
    Q, K, V = noise(n + 20, 10)
    assert replay_h2o(Q, K, V, n, 9)[-1] == oracle_h2o(Q, K, V, 9)


def test_h2o_budget_of_one_has_no_recent_token():
    Q, K, V = scene({}, 4)  # every token sees itself, mass 1: all ties
    assert replay_h2o(Q, K, V, 2, 1, scale=1.0) == [[[1]], [[2]], [[3]]]
    Q, K, V = scene({(0, 1): {0: 1.0}, (0, 2): {0: 1.0}}, 4)
    assert replay_h2o(Q, K, V, 2, 1, scale=1.0) == [[[0]], [[0]], [[0]]]  # the newest goes


# ---------------------------------------------------------------- TOVA


def test_tova_by_hand():
    rows = {
        (0, 3): {0: 0.4, 1: 0.1, 2: 0.3, 3: 0.2},  # keeps 0, 2, 3
        (0, 4): {0: 0.1, 2: 0.5, 3: 0.2, 4: 0.2},  # drops 0
        (0, 5): {2: 0.4, 3: 0.4, 4: 0.1, 5: 0.1},  # 4 and 5 tie: the earlier goes
        (0, 6): {2: 0.4, 3: 0.3, 5: 0.2, 6: 0.1},  # the newest is not protected
        (0, 7): {2: 0.1, 3: 0.3, 5: 0.2, 6: 0.9, 7: 0.4},
    }
    Q, K, V = scene(rows, 8)
    expected = [[0, 2, 3], [2, 3, 4], [2, 3, 5], [2, 3, 5], [3, 5, 7]]
    assert replay_tova(Q, K, V, 4, 3, scale=1.0) == [[tokens] for tokens in expected]


def test_tova_averages_all_query_heads_and_chooses_once():
    rows = {(0, 2): {0: 0.8, 1: 0.1, 2: 0.1}, (1, 2): {0: 0.1, 1: 0.5, 2: 0.4}}
    Q, K, V = scene(rows, 3, heads=2, key_heads=2)
    steps = list(trace_tova(Q, K, V, 2, 2, scale=1.0))
    assert [steps[1][1][0][j] for j in range(3)] == pytest.approx([0.45, 0.3, 0.25])
    assert [kept for kept, _ in steps] == [[[0, 1]] * 2, [[0, 1]] * 2]


@pytest.mark.parametrize("seed", range(3))
def test_tova_is_its_prefill_every_step(seed):
    Q, K, V = noise(seed, 24)
    assert replay_tova(Q, K, V, 15, 6) == replay_buffered(oracle_tova, Q, K, V, 15, 6, 1)
    assert replay_tova(Q, K, V, 3, 6) == replay_buffered(oracle_tova, Q, K, V, 3, 6, 1)


# ---------------------------------------------------------------- AhaKV

PLAIN = dict(scale=1.0, recent=1, pool=1, value_pool=1, step_gain=False)


def test_ahakv_by_hand_without_prior_and_gain():
    rows = {
        (0, 4): {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25},  # recent 4, ties: 1, 2, 3
        (0, 5): {1: 0.5, 2: 0.5},  # .75 .75 .25 and 0 for 4
        (0, 6): {3: 0.5, 5: 0.5},  # .75 .75 .75 and .5 for 5
        (0, 7): {6: 1.0},  # .75 .75 .75 and 1 for 6: a three-way tie, the earliest goes
    }
    Q, K, V = scene(rows, 8)
    expected = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [2, 3, 6, 7]]
    assert replay_ahakv(Q, K, V, 5, 4, value_prior=False, **PLAIN) == [[tokens] for tokens in expected]
    ranked = [step[0] for _, step in trace_ahakv(Q, K, V, 5, 4, value_prior=False, **PLAIN)]
    assert ranked[0] == {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25, 4: 0.0}
    assert ranked[1] == {1: 0.75, 2: 0.75, 3: 0.25, 4: 0.0, 5: 0.0}
    assert ranked[3] == {1: 0.75, 2: 0.75, 3: 0.75, 6: 1.0, 7: 0.0}


def test_ahakv_value_prior():
    rows = {(0, 4): {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}, (0, 5): {1: 0.5, 2: 0.375, 4: 0.125}, (0, 6): {5: 1.0}}
    Q, K, V = scene(rows, 7)
    V = np.ones((1, 7, 2)) / math.sqrt(2)
    V[0, 4], V[0, 5] = [6, 8], [3, 4]  # squared norms 100 and 25, else 1
    assert replay_ahakv(Q, K, V, 5, 4, value_prior=False, **PLAIN)[1] == [[1, 2, 3, 5]]
    ranked = [step[0] for _, step in trace_ahakv(Q, K, V, 5, 4, **PLAIN)]
    # γ̄ is 1/100 for tokens 0 to 3 of the prompt; then rows are added as they are, whatever the new tokens' values
    assert ranked[0] == pytest.approx({0: 0.0025, 1: 0.0025, 2: 0.0025, 3: 0.0025, 4: 0.0})
    assert ranked[1] == pytest.approx({1: 0.5025, 2: 0.3775, 3: 0.0025, 4: 0.125, 5: 0.0})
    assert ranked[2] == pytest.approx({1: 0.5025, 2: 0.3775, 4: 0.125, 5: 1.0, 6: 0.0})
    assert replay_ahakv(Q, K, V, 5, 4, **PLAIN) == [[[1, 2, 3, 4]], [[1, 2, 4, 5]], [[1, 2, 5, 6]]]


def test_ahakv_value_prior_on_every_row():
    rows = {(0, 4): {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}, (0, 5): {1: 0.5, 2: 0.375, 4: 0.125}, (0, 6): {5: 1.0}}
    Q, K, V = scene(rows, 7)
    V = np.ones((1, 7, 2)) / math.sqrt(2)
    V[0, 4], V[0, 5] = [6, 8], [3, 4]  # squared norms 100 and 25, else 1
    ranked = [step[0] for _, step in trace_ahakv(Q, K, V, 5, 4, decode_prior=True, **PLAIN)]
    assert ranked[0] == pytest.approx({0: 0.0025, 1: 0.0025, 2: 0.0025, 3: 0.0025, 4: 0.0})  # divided by the maximum
    assert ranked[1] == pytest.approx({1: 0.75, 2: 0.625, 3: 0.25, 4: 12.5, 5: 0.0})  # not divided
    assert ranked[2] == pytest.approx({1: 0.75, 2: 0.625, 4: 12.5, 5: 25.0, 6: 0.0})
    kept = [[[1, 2, 3, 4]], [[1, 2, 4, 5]], [[1, 4, 5, 6]]]  # 2 goes where 4 went above
    assert replay_ahakv(Q, K, V, 5, 4, decode_prior=True, **PLAIN) == kept


def test_ahakv_prompt_priors_are_pooled_and_new_ones_are_not():
    rows = {(0, 4): {3: 1.0}, (0, 5): {4: 1.0}, (0, 6): {5: 1.0}}
    Q, K, V = scene(rows, 7)
    V = np.array([[[1.0], [1.0], [2.0], [3.0], [5.0], [7.0], [1.0]]])
    options = {**PLAIN, "value_pool": 3, "decode_prior": True}
    ranked = [step[0] for _, step in trace_ahakv(Q, K, V, 5, 10, **options)]
    assert ranked[1][3] == pytest.approx((4 + 9 + 25) / 3)  # F = 1
    assert ranked[1][4] == pytest.approx((9 + 25) / 2)  # the prompt's end: token 5 never entered the pool
    assert ranked[2][4] == ranked[1][4]
    assert ranked[2][5] == pytest.approx(49)


def test_ahakv_carries_the_unpooled_sum():
    Q, K, V = scene({(0, 4): {0: 1.0}}, 6)  # token 5 looks at itself
    options = {**PLAIN, "pool": 3}
    steps = [(kept[0], ranked[0]) for kept, ranked in trace_ahakv(Q, K, V, 5, 3, **options)]
    assert steps[0] == ([0, 1, 4], {0: 0.5, 1: 1 / 3, 2: 0.0, 3: 0.0, 4: 0.0})
    assert steps[1] == ([0, 4, 5], {0: 1.0, 1: 0.0, 4: 0.0, 5: 1.0})  # 1 and 4 tie at 0


@pytest.mark.parametrize("prompt", [1, 2, 4])
def test_ahakv_step_gain_counts_all_tokens_seen(prompt):
    # Every query has raw q·k = 1 with key 0 and 0 with the others (K is one-hot, d = 6); B = 2, one recent token.
    T, B = 6, 2
    Q = np.zeros((1, T, T))
    Q[0, :, 0] = 1.0
    K, V = np.eye(T)[None], np.ones((1, T, 1))

    def weight(seen, cached, gain=True):
        lam = math.sqrt(2 * math.log(seen / B) / T) if gain and seen > B else 1 / math.sqrt(T)
        return math.exp(lam) / (math.exp(lam) + cached - 1)

    for gain in (True, False):
        steps = list(trace_ahakv(Q, K, V, prompt, B, pool=1, step_gain=gain))
        F = weight(prompt, prompt, gain)  # rows = min(32, B//2, n) = 1
        for s in range(1, T - prompt + 1):
            seen = prompt + s
            cached = min(seen, B + 1)
            F += weight(seen, cached, gain)
            kept, ranked = steps[s]
            assert ranked[0][0] == pytest.approx(F)
            assert len(ranked[0]) == cached
            assert kept == [[0, seen - 1]]


@pytest.mark.parametrize("prior", [True, False])
def test_ahakv_gain_on_top_of_the_scale(prior):
    # As above, B = 2, n = 4: λ = sqrt(2 ln 2 / 6) times the scale 3 with one recent row of four keys, then 5 of three.
    Q, K, V = np.zeros((1, 6, 6)), np.eye(6)[None], np.ones((1, 6, 1))
    Q[0, :, 0] = 1.0
    first, second = (math.exp(3 * math.sqrt(2 * math.log(seen / 2) / 6)) for seen in (4, 5))
    options = dict(scale=3.0, pool=1, gain="multiply", decode_prior=prior)
    ranked = [step[0] for _, step in trace_ahakv(Q, K, V, 4, 2, **options)]
    assert ranked[0][0] == pytest.approx(first / (first + 3))
    assert ranked[1][0] == pytest.approx(first / (first + 3) + second / (second + 2))
    plain = [step[0] for _, step in trace_ahakv(Q, K, V, 4, 2, **{**options, "gain": "replace"})]
    assert plain[0][0] == pytest.approx(first ** (1 / 3) / (first ** (1 / 3) + 3))


def test_ahakv_of_all_rows_starts_from_all_rows():
    rows = {(0, 1): {0: 1.0}, (0, 2): {0: 1.0}, (0, 3): {1: 0.5, 2: 0.5}}
    Q, K, V = scene(rows, 5)
    ranked = [step[0] for _, step in trace_ahakv(Q, K, V, 4, 2, recent_only=False, **PLAIN)]
    assert ranked[0] == {0: 3.0, 1: 0.5, 2: 0.5, 3: 0.0}  # the last row alone: 0, .5, .5, 0
    assert replay_ahakv(Q, K, V, 4, 2, recent_only=False, **PLAIN) == [[[0, 3]], [[0, 4]]]
    assert replay_ahakv(Q, K, V, 4, 2, **PLAIN) == [[[2, 3]], [[2, 4]]]


def test_ahakv_short_prompt_carries_its_last_rows():
    Q, K, V = noise(3, 8, heads=2, key_heads=1)
    *_, (kept, ranked) = trace_ahakv(Q, K, V, 5, 8, value_prior=False)
    a = common.attention(Q, K)  # B = 8: no gain; rows = min(32, 4, 5) = 4 of the prompt, then one per step
    votes = a[:, 1:].sum(axis=1).mean(axis=0)
    assert kept == [list(range(8))]
    assert [ranked[0][j] for j in range(8)] == pytest.approx(votes)


def test_ahakv_recent_shrinks_to_half():
    Q, K, V = noise(4, 30)
    for s, kept in enumerate(replay_ahakv(Q, K, V, 20, 9)):
        assert all(tokens[-4:] == list(range(16 + s, 20 + s)) for tokens in kept)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_gain": False},
        {"value_prior": False},
        {"recent": 3, "pool": 3},
        {"gain": "multiply"},
        {"recent_only": False},
    ],
)
@pytest.mark.parametrize("budget", [1, 2, 7, 12])
def test_ahakv_starts_from_the_prefill(budget, options):
    Q, K, V = noise(budget, 18)
    prompt = oracle_ahakv(Q[:, :15], K[:, :15], V[:, :15], budget, **options)
    assert replay_ahakv(Q, K, V, 15, budget, **options)[0] == prompt
    assert replay_ahakv(Q, K, V, 15, budget, decode_prior=True, **options)[0] == prompt


# ---------------------------------------------------------------- StreamingLLM


def test_streaming_by_hand():
    assert replay_streaming(3, 7, 4, 2) == [[[0, 1, 2]], [[0, 1, 2, 3]], [[0, 1, 3, 4]], [[0, 1, 4, 5]], [[0, 1, 5, 6]]]
    assert replay_streaming(5, 6, 3, 0, key_heads=2) == [[[2, 3, 4]] * 2, [[3, 4, 5]] * 2]
    assert replay_streaming(5, 6, 3, 9) == [[[0, 1, 2]], [[0, 1, 2]]]  # all sinks


# ---------------------------------------------------------------- buffered


def test_buffered_by_hand():
    rows = {(0, 3): {0: 1.0}, (0, 4): {1: 1.0}, (0, 5): {2: 1.0}, (0, 6): {2: 0.6, 4: 0.4}, (0, 7): {2: 0.2, 4: 0.8}}
    Q, K, V = scene(rows, 8)
    options = dict(scale=1.0, window=1, pool=1)
    # B = 2: one candidate and the window. Prompt of 4: 0 and 3.
    assert replay_buffered(oracle_snapkv, Q, K, V, 4, 2, 3, **options) == [
        [[0, 3]],
        [[0, 3, 4]],
        [[0, 3, 4, 5]],
        [[4, 6]],  # 0 3 4 5 6 = B + 3: token 6 prefers 2, which is gone, so 4
        [[4, 6, 7]],
    ]
    assert replay_buffered(oracle_snapkv, Q, K, V, 4, 2, 1, **options)[0] == [[0, 3]]


def test_buffered_short_prompt_uses_the_buffer_too():
    Q, K, V = noise(0, 12)
    sizes = [len(kept[0]) for kept in replay_buffered(oracle_snapkv, Q, K, V, 2, 4, 3)]
    assert sizes == [2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6]  # 7 = B + 3 is never left standing


def test_buffered_protokv_by_hand():
    # One-hot keys and one range per token: every token is its own cluster, so its rank is the raw sum itself.
    T = 7
    K, V = np.eye(T)[None], np.ones((1, T, 1))
    Q = np.zeros((1, T, T))
    Q[0, 2] = [3, 9, 0, 0, 0, 0, 0]
    Q[0, 3] = [1, -9, 2, 0, 0, 0, 0]
    Q[0, 5] = [0, 50, -4, 0, 5, 0, 0]
    Q[0, 6] = [1, 50, 3, -2, -6, 99, 99]
    W, b = random_features(T)
    options = dict(W=W, b=b, prototypes="chunks", chunks=T, window=2)
    # B = 4: the window of 2 and two candidates. Prompt of 5, rows 3 and 4: 1, -9, 2 -> 0, 2 and 3, 4.
    # At 7 tokens: 0, 2, 3, 4 by rows 5 and 6: 1, -1, -2, -1 -> 0, and 2 and 4 tie: the later.
    expected = [[[0, 2, 3, 4]], [[0, 2, 3, 4, 5]], [[0, 4, 5, 6]]]
    assert replay_buffered(oracle_protokv, Q, K, V, 5, 4, 2, **options) == expected
    assert np.allclose(votes_protokv(Q, K[:, [0, 2, 3, 4, 5, 6]], 2), [[1, -1, -2, -1, 99, 99]])


@pytest.mark.parametrize("select", [oracle_snapkv, oracle_chunkkv, oracle_tova, protokv, oracle_satkv])
def test_buffered_equals_a_stream_of_equal_chunks(select):
    Q, K, V = noise(5, 40)
    replay = replay_buffered(select, Q, K, V, 10, 8, 10)
    for end in (10, 20, 30, 40):
        assert replay[end - 10] == stream(select, Q[:, :end], K[:, :end], V[:, :end], 8, 10)


@pytest.mark.parametrize("select", [oracle_snapkv, protokv, lambda *a, **o: protokv(*a, votes="softmax", **o)])
def test_buffered_is_a_prefill_of_the_cache_when_the_window_is_kept(select):
    # The voters are then the cache's own last tokens, so forgetting the true positions changes nothing.
    Q, K, V = noise(6, 30)
    budget, buffer, previous = 8, 4, None
    for s, kept in enumerate(replay_buffered(select, Q, K, V, 15, budget, buffer)):
        if s > 0 and s % buffer == 0:
            end = 15 + s
            cached = [tokens + [end - 1] for tokens in previous]
            m = len(cached[0])
            assert m == budget + buffer
            small_K, small_V = (np.array([X[h, cached[h]] for h in range(2)]) for X in (K, V))
            chosen = select(Q[:, end - m : end], small_K, small_V, budget)
            assert kept == [[cached[h][j] for j in chosen[h]] for h in range(2)]
        previous = kept


def test_buffer_of_one_evicts_every_step():
    Q, K, V = noise(7, 30)
    replay = replay_buffered(oracle_snapkv, Q, K, V, 20, 8, 1)
    for s, kept in enumerate(replay):
        assert all(len(tokens) == 8 and tokens[-4:] == list(range(16 + s, 20 + s)) for tokens in kept)
    assert replay_buffered(oracle_streamingllm, Q, K, V, 20, 8, 1, sinks=3) == replay_streaming(20, 30, 8, 3, 2)
    assert replay_buffered(oracle_snapkv, Q, K, V, 20, 8, 0) == replay


@pytest.mark.parametrize("buffer", [1, 3, 5])
def test_buffered_sizes(buffer):
    Q, K, V = noise(8, 32)
    for select in (oracle_snapkv, protokv):
        sizes = [len(kept[0]) for kept in replay_buffered(select, Q, K, V, 20, 8, buffer)]
        assert sizes == [8 + s % buffer for s in range(13)]


# ---------------------------------------------------------------- what holds for all


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("n, budget", [(16, 9), (16, 1), (16, 2), (5, 9), (9, 9), (10, 9)])
def test_invariants(n, budget, seed):
    Q, K, V = noise(seed, 24)
    for name, (replay, prefill) in every_replay(Q, K, V, n, budget).items():
        assert len(replay) == 24 - n + 1, name
        assert replay[0] == prefill(Q[:, :n], K[:, :n], V[:, :n], budget), name
        before = None
        for s, kept in enumerate(replay):
            newest = n + s - 1
            assert len(kept) == 2, name
            for h, tokens in enumerate(kept):
                assert len(tokens) == min(budget, n + s), name  # full as soon as it can be, never more than B
                assert tokens == sorted(set(tokens)) and tokens[0] >= 0 and tokens[-1] <= newest, name
                if before is not None:
                    assert set(tokens) <= {*before[h], newest}, name  # what was dropped never returns
                if budget > 1 and name not in ("tova", "lm_infinite") and not (name == "streaming" and budget <= 4):
                    assert tokens[-1] == newest, name
            before = kept


def test_a_large_budget_keeps_everything():
    Q, K, V = noise(9, 20)
    everything = [[list(range(end))] * 2 for end in range(12, 21)]
    for budget in (20, 99):
        for name, (replay, _) in every_replay(Q, K, V, 12, budget).items():
            assert replay == everything, name
        assert replay_buffered(oracle_snapkv, Q, K, V, 12, budget, 6) == everything


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_input_is_left_alone(dtype):
    Q, K, V = (x.astype(dtype) for x in noise(10, 20))
    copies = [x.copy() for x in (Q, K, V)]
    first = every_replay(Q, K, V, 12, 7)
    assert all(np.array_equal(x, y) for x, y in zip((Q, K, V), copies, strict=True))
    again = every_replay(Q.astype(np.float64), K.astype(np.float64), V.astype(np.float64), 12, 7)
    assert {name: kept for name, (kept, _) in first.items()} == {name: kept for name, (kept, _) in again.items()}
