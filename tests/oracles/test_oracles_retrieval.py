"""Checks of the retrieval oracles themselves: tiny cases worked out by hand, and what always must hold."""

import math

import numpy as np
import pytest

from oracles import retrieval as r


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


# ---------------------------------------------------------------- vectors


def test_cosine_of_a_null_vector_is_nought():
    assert r.cosine([3, 4], [4, 3]) == pytest.approx(24 / 25)
    assert r.cosine([0, 0], [1, 2]) == 0.0


def test_joined_averages_the_group_then_concatenates_key_heads():
    queries = [[[1, 2]], [[3, 4]], [[10, 20]], [[30, 60]]]  # 4 heads, 1 token
    assert r.joined(queries, 2).tolist() == [[2, 3, 20, 40]]
    assert r.joined(queries, 4).tolist() == [[1, 2, 3, 4, 10, 20, 30, 60]]
    assert r.joined(queries, 1).tolist() == [[11, 21.5]]


def test_joined_products_are_the_group_means_summed_over_key_heads():
    queries, keys = noise(4, 1, 3), noise(2, 1, 3, seed=1)
    by_head = [float(queries[h, 0] @ keys[h // 2, 0]) for h in range(4)]
    assert r.dot(r.joined(queries, 2)[0], r.joined(keys, 2)[0]) == pytest.approx(sum(by_head) / 2)


# ---------------------------------------------------------------- probes


def test_running_moments():
    mean, variance = r.running([[[1, 5], [3, 5]], [[0, 0], [0, 6]]])
    assert mean.tolist() == [[2, 5], [0, 3]]
    assert variance.tolist() == [[1, 0], [0, 9]]


def test_a_constant_dimension_has_no_variance_whatever_the_rounding():
    assert r.moments([[0.1]] * 11 + [[0.1]] * 38)[1].tolist() == [0.0]


def test_probe_leans_to_the_surprising_query():
    # mean (0, 0), variance (1, 4): φ = (1, 0), (0, 1), (4, 4): weights 1, 1, 8 of 10
    window = [[1, 0], [0, 2], [2, -4]]
    assert r.activation(window, [0, 0], [1, 4]) == [1, 1, 8]
    assert r.probe(window, [0, 0], [1, 4]) == pytest.approx([0.1 + 1.6, 0.2 - 3.2])
    # a dimension that never varied adds nothing to φ: weights 1, 0, 4 of 5, but the probe still carries it
    assert r.probe(window, [0, 0], [1, 0]) == pytest.approx([0.2 + 1.6, -3.2])


def test_probe_without_any_surprise_is_the_mean():
    assert r.probe([[1, 2], [3, 4]], [0, 0], [0, 0]).tolist() == [2, 3]
    assert r.mean_probe([[1, 2], [3, 4]]).tolist() == [2, 3]


def test_the_kind_of_variance_does_not_matter():
    vectors = noise(9, 4)
    mean, variance = r.moments(vectors)
    assert r.probe(vectors[5:], mean, variance * 9 / 8) == pytest.approx(r.probe(vectors[5:], mean, variance))


def test_probe_per_head_weighs_each_head_alone():
    window = [[[1.0], [3.0]], [[2.0], [0.0]]]  # weights 1:9 and 4:0
    got = r.probe_per_head(window, [[0.0], [0.0]], [[1.0], [7.0]])
    assert got == pytest.approx(np.array([[2.8], [2.0]]))


# ---------------------------------------------------------------- chunks


def test_representatives_with_and_without_softmax():
    # one head; token logits of the two queries: (4, 0), (0, 3), (1, 1) -> means 2, 1.5, 1
    keys, queries = [[[4, 0], [0, 3], [1, 1]]], [[[1, 0], [0, 1]]]
    assert r.representative_scores(queries, keys, 1.0).tolist() == [[2, 1.5, 1]]
    assert r.representative_scores(queries, keys, 0.5).tolist() == [[1, 0.75, 0.5]]
    assert r.representatives(queries, keys, 1.0, 1) == [0]
    assert r.representatives(queries, keys, 1.0, 2) == [0, 1]
    rows = np.exp([[4, 0, 1], [0, 3, 1]])
    wanted = (rows / rows.sum(axis=1, keepdims=True)).mean(axis=0)
    assert r.representative_scores(queries, keys, 1.0, True)[0] == pytest.approx(wanted)


def test_softmax_can_change_the_representative():
    # one huge logit against many good ones: raw prefers token 0, attention prefers token 1
    keys, queries = [[[9, 0, 0], [0, 2, 2]]], [[[1, 0, 0], [0, 1, 0], [0, 0, 1]]]
    assert r.representatives(queries, keys, 1.0, 1) == [0]
    assert r.representatives(queries, keys, 1.0, 1, softmax=True) == [1]


def test_representatives_ties_go_to_the_later_and_all_when_few():
    keys, queries = [[[1.0], [1.0], [1.0]]], [[[1.0]]]
    assert r.representatives(queries, keys, 1.0, 2) == [1, 2]
    assert r.representatives(queries, keys, 1.0, 4) == [0, 1, 2]


def test_representatives_per_layer_and_per_key_head():
    queries = [[[1.0]], [[3.0]], [[1.0]], [[1.0]]]  # group means 2 and 1
    keys = [[[1.0], [2.0], [0.0]], [[5.0], [0.0], [6.0]]]  # 2, 4, 0 and 5, 0, 6; over both 3.5, 2, 3
    assert r.representatives_per_head(queries, keys, 1.0, 1) == [[1], [2]]
    assert r.representatives(queries, keys, 1.0, 1) == [0]


def test_chunk_scores_are_means_over_representatives():
    chunks = [[[2, 0], [0, 5]], [[3, 4]], [[0, 0], [1, 0]]]
    assert r.chunk_scores_cosine([1, 0], chunks) == pytest.approx([0.5, 0.6, 0.5])
    assert r.chunk_scores_dot([2, 0], chunks) == [2, 6, 1]
    assert r.best_chunks([0.5, 0.6, 0.5], 2) == [1, 2]
    assert r.best_chunks([0.5, 0.6, 0.5], 9) == [0, 1, 2]


# ---------------------------------------------------------------- layer budgets


def test_entropy():
    assert r.entropy([0.3] * 8) == pytest.approx(math.log(8))
    assert r.entropy([0.7]) == 0.0
    assert r.entropy([math.log(3), 0.0]) == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))


def test_layer_budgets_by_hand():
    # 2/(2 + 1 + 1) of 96 = 48 -> 32; left 64; 1/(1 + 1) of 64 = 32; the rest, 32
    assert r.layer_budgets([2, 1, 3], [99, 1, 1], 96, 32) == [32, 32, 32]
    # 1/4 of 96 = 24 -> 0; 3/4 of 96 = 72 -> 64; the rest
    assert r.layer_budgets([1, 3, 1], [1, 2, 1], 96, 32) == [0, 64, 32]
    assert r.layer_budgets([1, 3, 1], [1, 2, 1], 96, 1) == [24, 54, 18]


def test_equal_densities_share_equally_whatever_their_rounding():
    for density in (0.1, 0.7, 3.3, math.log(46)):
        assert r.layer_budgets([density] * 7, [density] * 7, 7 * 46 * 32, 32) == [46 * 32] * 7
    assert r.layer_budgets([0.0] * 3, [0.0] * 3, 96, 32) == [32, 32, 32]


def test_layer_budgets_are_whole_chunks_and_never_above_the_total():
    rng = np.random.default_rng(3)
    for total in (0, 31, 33, 1000, 4096):
        now, later = rng.uniform(0, 5, 6), rng.uniform(0, 5, 6)
        got = r.layer_budgets(now, later, total, 32)
        assert all(b % 32 == 0 and b >= 0 for b in got)
        assert total - 32 < sum(got) <= total


# ---------------------------------------------------------------- Quest, TokenSelect


def test_quest_bound_by_hand():
    page = [[[1, -2], [-3, 5]]]  # one KV head: min (-3, -2), max (1, 5)
    assert r.quest_bounds([[2, 1], [-1, -1]], page) == [2 + 5, 3 + 2]
    assert r.quest_maxima([[2, 1], [-1, -1]], page) == [0, 1]
    assert r.over_group([7, 5], 1) == [6]


def test_quest_bounds_are_above_the_truth_and_exact_for_one_key():
    query, keys = noise(4, 8), noise(2, 10, 8, seed=1)
    for s in range(0, 10, 4):
        page = [head[s : s + 4] for head in keys]
        assert all(b >= m for b, m in zip(r.quest_bounds(query, page), r.quest_maxima(query, page), strict=True))
    one = [head[:1] for head in keys]
    assert r.quest_bounds(query, one) == pytest.approx(r.quest_maxima(query, one))


def test_quest_scores_per_key_head_with_a_short_last_page():
    keys = [[[1.0], [4.0], [2.0]], [[0.0], [1.0], [-3.0]]]
    query = [[1.0], [3.0], [1.0], [-1.0]]  # head 0: 4, 2 and 12, 6; head 1: 1, -3 and 0, 3
    assert r.quest_scores(query, keys, 2).tolist() == [[8, 4], [0.5, 0]]


def test_tokenselect_sums_the_heads_softmax():
    keys = [[[math.log(3)], [0.0]]]
    votes = r.tokenselect_votes([[[1.0]], [[0.0]]], keys, 1.0)
    assert votes == pytest.approx([0.75 + 0.5, 0.25 + 0.5])
    # a window's queries are averaged before the softmax: (2 + 0)/2 = 1
    assert r.tokenselect_votes([[[2.0], [0.0]], [[1.0], [-1.0]]], keys, 1.0) == pytest.approx(votes)
    assert r.tokenselect_votes(noise(4, 3, 5), noise(2, 9, 5), None).sum() == pytest.approx(4)


# ---------------------------------------------------------------- clusters


def test_kmeans_two_directions():
    keys = [[2, 0], [4, 0.0], [0, 1], [0, 3], [1, 1]]  # the last is as near to both: the lower centroid
    assignment, centroids = r.kmeans(keys, 2, 1, [0, 2])
    assert assignment == [0, 0, 1, 1, 0]
    assert centroids == pytest.approx(np.array([[7 / 3, 1 / 3], [0, 2]]))
    again = r.kmeans(keys, 2, 10, [0, 2])  # nothing moves any more
    assert again[0] == assignment and np.array_equal(again[1], centroids)


def test_kmeans_without_rounds_and_with_an_empty_cluster():
    keys = [[1, 0], [2, 0], [0, 1]]
    assignment, centroids = r.kmeans(keys, 3, 0, [1, 0, 2])
    assert assignment == [0, 0, 2]  # centroid 1 is parallel to 0 and loses every tie
    assert centroids.tolist() == [[2, 0], [1, 0], [0, 1]]
    assignment, centroids = r.kmeans(keys, 3, 5, [1, 0, 2])
    assert assignment == [0, 0, 2]
    assert centroids.tolist() == [[1.5, 0], [1, 0], [0, 1]]  # the empty one stays


def test_kmeans_metric():
    keys = [[1, 0.2], [5, 0], [0, 1]]
    assert r.kmeans(keys, 2, 0, [0, 1])[0] == [0, 1, 0]
    assert r.kmeans(keys, 2, 0, [0, 1], "dot")[0] == [1, 1, 0]  # 1.04 and 5; 5 and 25; 0.2 and 0


def test_clusters_until_cuts_the_last():
    assert r.clusters_until([0.1, 0.9, 0.5], [4, 3, 2], 4) == [0, 3, 1]
    assert r.clusters_until([0.1, 0.9, 0.5], [4, 3, 2], 99) == [4, 3, 2]
    assert r.clusters_until([0.1, 0.9, 0.5], [4, 3, 2], 0) == [0, 0, 0]
    assert r.clusters_until([0.5, 0.5], [2, 2], 3) == [1, 2]
    assert r.clusters_until([0.5, 0.5], [2, 2], 3, last=[9, 4]) == [2, 1]


def test_tokens_until_keeps_the_callers_order_in_the_cut():
    members = [[0, 3, 4, 8], [7, 1, 5], [6, 2]]
    assert r.tokens_until([0.1, 0.9, 0.5], members, 4) == [1, 5, 6, 7]
    assert r.tokens_until([0.5, 0.5, 0.5], members, 6) == [0, 1, 3, 4, 7, 8]  # they end at 8, 7, 6
    assert r.tokens_until([0.5, 0.5, 0.5], members, 20) == list(range(9))


def test_squeezed_scores_by_hand():
    centroids, sizes = [[math.log(4), 0], [0, 1], [math.log(2), 9]], [1, 2, 3]
    # exp: 4, 1, 2; the sum 4 + 2 + 6 = 12
    scores = r.squeezed_scores([1, 0], centroids, sizes, 1.0)
    assert scores == pytest.approx([4 / 12, 1 / 12, 2 / 12])
    assert r.squeezed_kept(scores, 0.1) == [0, 2]
    assert r.squeezed_kept([0.25, 0.5], 0.25) == [1]
    assert r.dot(sizes, r.squeezed_scores([500, 0], centroids, sizes, None)) == pytest.approx(1)


def test_squeezed_scores_are_attention_when_every_token_is_a_cluster():
    query, keys = noise(4), noise(6, 4, seed=1)
    weights = np.exp(keys @ query / 2)
    assert r.squeezed_scores(query, keys, [1] * 6, None) == pytest.approx(weights / weights.sum())


def test_sentence_scores():
    assert r.sentence_scores([3, 4], [[2, 0], [4, 3], [0, 0]]) == [6, 24, 0]
    assert r.sentence_scores([3, 4], [[2, 0], [4, 3], [0, 0]], True) == pytest.approx([0.6, 0.96, 0])


# ---------------------------------------------------------------- EM-LLM


def test_boundaries_at_surprise_peaks():
    # t=1: 2 > 1 + 0; t=2: mean 1.5, std .5: 2 is not above 2; t=3: (2, 2) -> 5 > 2; t=4: (2, 5): 3.5 + 1.5
    assert r.emllm_boundaries([1, 2, 2, 5, 5], 1.0, 2) == [0, 1, 3]
    assert r.emllm_boundaries([1, 2, 2, 5, 5], 0.0, 2) == [0, 1, 2, 3, 4]
    assert r.emllm_boundaries([3, 3, 3], 1.0, 8) == [0]
    assert r.emllm_boundaries([9, 1, 1, 2], 1.0, 2) == [0, 3]
    assert r.emllm_boundaries([9, 1, 1, 2], 1.0, 3) == [0]
    assert r.emllm_boundaries([], 1.0, 3) == []


def test_modularity_by_hand():
    two_pairs = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]  # 2m = 4, all degrees 1
    # Newman: 1/4 · (4 - 8/4) = 1/2; the paper's factor halves it
    assert r.modularity(two_pairs, [0, 0, 1, 1]) == pytest.approx(0.25)
    assert r.modularity(two_pairs, [0, 0, 0, 0]) == pytest.approx(0.0)
    assert r.modularity(two_pairs, [0, 1, 0, 1]) == pytest.approx(-0.25)
    assert r.modularity([[0, 0], [0, 0]], [0, 1]) == 0.0


def test_similarity_is_the_dot_product_graph():
    assert r.similarity([[1, 2], [3, 0]]).tolist() == [[5, 3], [3, 9]]
    assert r.similarity(noise(5, 3)).sum() >= 0


def test_refine_moves_a_boundary_back_to_the_change():
    keys = [[1, 0]] * 3 + [[0, 1]] * 4
    assert r.refine([0, 5], r.similarity(keys)) == [0, 3]
    assert r.refine([0, 3], r.similarity(keys)) == [0, 3]
    assert r.refine([0, 2], r.similarity(keys)) == [0, 2]  # it can only move back
    assert r.refine([0], r.similarity(keys)) == [0]


def test_refine_goes_left_to_right_in_place():
    keys = [[1, 0, 0]] * 3 + [[0, 1, 0]] * 2 + [[0, 0, 1]] * 4
    # β = 5 sees tokens 0..6, aaabbcc, 2m = 17: cut at 3, 17 - (9² + 8²)/17, beats 5, 17 - (13² + 4²)/17 (over all
    # nine tokens 5 would win); then α = 3, β = 7 sees bbcccc: cut at 5, out of reach from the old α = 5
    assert r.refine([0, 5, 7], r.similarity(keys)) == [0, 3, 5]


def test_refine_ties_go_to_the_later():
    assert r.refine([0, 3], np.zeros((5, 5))) == [0, 3]


# ---------------------------------------------------------------- attention over what was retrieved


def test_rotate_is_half_split():
    quarter = math.pi / 2
    assert r.rotate([1, 2, 3, 4], 1, [quarter, 0.0]) == pytest.approx([-3, 2, 1, 4])
    assert r.rotate([1, 2, 3, 4], 2, [quarter, quarter]) == pytest.approx([-1, -2, -3, -4])
    assert r.rotate([1, 2, 7], 1, [quarter]) == pytest.approx([-2, 1, 7])  # what is not turned stays
    assert r.rotate([1, 2, 3, 4], 0, [1.0, 0.1]) == [1, 2, 3, 4]


def test_far_tokens_sit_at_the_edge_and_near_ones_where_they_are():
    turn = [math.pi / 2]  # one position is a quarter turn
    q = [math.log(2), 0.0]
    # q at the edge 1: (0, log 2): the far key (0, 1) has weight 2, (1, 0) weight 1
    # near, distance 0: (1, 0) weight 2; distance 2: (1, 0) half a turn behind, weight 1/2; after the query: not seen
    out = r.retrieved_attention(
        q,
        10,
        far_keys=[[0, 1], [1, 0]],
        far_values=[[1, 0, 0], [0, 1, 0]],
        near_keys=[[1, 0], [1, 0], [1, 0]],
        near_values=[[0, 0, 1], [0, 1, 1], [99, 99, 99]],
        near_positions=[8, 10, 11],
        edge=1,
        inv_freq=turn,
        scale=1.0,
    )
    assert out == pytest.approx([2 / 5.5, (1 + 2) / 5.5, (0.5 + 2) / 5.5])


def test_near_alone_depends_on_distances_only_and_far_not_on_the_position():
    q, keys, values = noise(4), noise(5, 4, seed=1), noise(5, 3, seed=2)
    turns = [1.0, 0.01]

    def out(shift):
        near = [keys[2:], values[2:], [shift + 3, shift + 4, shift + 5]]
        return r.retrieved_attention(q, shift + 5, keys[:2], values[:2], *near, 6, turns, None)

    assert out(0) == pytest.approx(out(1000))


def test_a_far_token_at_its_true_distance_is_ordinary_attention():
    q, keys, values = noise(4), noise(4, 4, seed=1), noise(4, 4, seed=2)
    turns = [1.0, 0.01]
    logits = [np.dot(r.rotate(q, 3, turns), r.rotate(k, j, turns)) / 2 for j, k in enumerate(keys)]
    weights = np.exp(logits) / np.exp(logits).sum()
    got = r.retrieved_attention(q, 3, keys[:1], values[:1], keys[1:], values[1:], [1, 2, 3], 3, turns, None)
    assert got == pytest.approx(weights @ values)
    everything_near = r.retrieved_attention(q, 3, [], [], keys, values, range(4), 99, turns, None)
    assert everything_near == pytest.approx(weights @ values)
