"""Checks of the oracle of representatives itself: tiny cases worked out by hand, and what always must hold."""

import math

import numpy as np
import pytest

from oracles import representatives as known
from oracles import retrieval as r


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


MASS = np.array([[5, 1, 3, 3, 9, 0], [1, 4, 4, 0, 2, 0.0]])  # two query heads, six tokens


def test_representatives_of_each_query_head_in_rank_order():
    assert known.ranked([5, 1, 3, 3], range(4), 3) == [0, 3, 2]  # ties: the later
    assert known.representatives(MASS, range(4), 2) == [[0, 2], [3, 1]]  # head 0: 0, 3; head 1: 2, 1
    assert known.representatives(MASS, [4, 5], 1) == [[4, 4]]
    # means 3, 2.5, 3.5, 1.5
    assert known.representatives(MASS, range(4), 2, per_head=False) == [[2, 2], [0, 0]]
    # an event of two tokens with two or more representatives: nothing to choose, token by token
    assert known.representatives(MASS, [0, 1], 2) == known.representatives(MASS, [0, 1], 9) == [[0, 0], [1, 1]]
    assert known.representatives(MASS, [0, 1], 9, mix_all=True) == [[0, 1], [1, 0]]


def test_the_head_of_a_representative_reads_its_own_key_head():
    keys = np.array([[[1.0], [2.0], [3.0]], [[10.0], [20.0], [30.0]]])
    got = known.representative_keys(keys, [[0, 1, 2, 0], [2, 2, 1, 1]])  # heads 0, 1 read KV head 0; 2, 3 read 1
    assert [one.tolist() for one in got] == [[1, 2, 30, 10], [3, 3, 20, 20]]
    assert known.repeated([1, 2, 3, 4], 2, 4).tolist() == [1, 2, 1, 2, 3, 4, 3, 4]


def test_unit_score_by_hand():
    # one KV head, two query heads; representative 0: (3, 0) and (0, 4), length 5; 1: (0, 4) twice, length √32
    keys, chosen = np.array([[[3.0, 0], [0, 4.0]]]), [[0, 1], [1, 1]]
    # probe (1, 1), repeated: length 2. Cosines (3 + 4)/(2·5) and 8/(2·√32) = 1/√2; dots (3 + 4)/2 and 8/2
    assert known.unit_score([1, 1], keys, chosen, True) == pytest.approx((0.7 + math.sqrt(0.5)) / 2)
    assert known.unit_score([1, 1], keys, chosen, False) == pytest.approx((3.5 + 4) / 2)
    # descriptions: [(1.5, 2)/(5/√2) + (0, 4)/4]/2 and [(1.5, 2) + (0, 4)]/2
    assert known.description(keys, chosen, True) == pytest.approx([0.3 / math.sqrt(2), (0.4 * math.sqrt(2) + 1) / 2])
    assert known.description(keys, chosen, False) == pytest.approx([0.75, 3])


def test_question_weight_by_hand():
    keys, chosen = np.array([[[3.0, 0], [0, 4.0]]]), [[[0, 1], [1, 1]], [[0, 0]]]
    question = [[0, 1], [0, 3]]  # its mean (0, 2), so (0, 2, 0, 2), of length √8
    plain = known.unit_scores([1, 1], keys, chosen, True, question)
    assert plain[1] == pytest.approx(math.sqrt(0.5))
    got = known.unit_scores([1, 1], keys, chosen, True, question, 0.5)
    root = math.sqrt(0.5)  # cosines 8/(√8·5) = .8·√.5 and 16/(√8·√32) = 1 with the first unit, 0 with the second
    assert got == pytest.approx([plain[0] + 0.5 * (0.8 * root + 1) / 2, plain[1]])
    # the description (.212, .783) as one vector: cosine .783/√(.212² + .783²)
    x, y = 0.3 * root, (0.4 / root + 1) / 2
    whole = known.unit_scores([1, 1], keys, chosen, True, question, 0.5, "description")
    assert whole == pytest.approx([plain[0] + 0.5 * y / math.hypot(x, y), plain[1]])
    assert known.unit_scores([1, 1], keys, chosen, True, None, 0.5) == plain


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("use_cosine", [True, False])
def test_unit_score_is_the_description_times_the_probe(heads, kv_heads, use_cosine):
    keys, mass, probe = noise(kv_heads, 20, 3), noise(heads, 20, seed=1), noise(kv_heads * 3, seed=2)
    events = [range(0, 7), range(7, 9), range(9, 10), range(10, 20)]  # of any size
    length = np.linalg.norm(probe) if use_cosine else 1.0
    for count in (1, 2, 4):
        chosen = [known.representatives(mass, tokens, count) for tokens in events]
        assert [len(one) for one in chosen] == [min(count, len(tokens)) for tokens in events]
        want = [known.description(keys, one, use_cosine) @ probe / length for one in chosen]
        assert known.unit_scores(probe, keys, chosen, use_cosine) == pytest.approx(want)
        # one choice for all heads is the joined keys' own score
        chosen = [known.representatives(mass, tokens, count, per_head=False) for tokens in events]
        matched = r.chunk_scores_cosine if use_cosine else r.chunk_scores_dot
        speakers = [r.joined(keys, kv_heads)[[tokens[0] for tokens in one]] for one in chosen]
        assert known.unit_scores(probe, keys, chosen, use_cosine) == pytest.approx(matched(probe, speakers))
        assert [sorted(t[0] for t in one) for one in chosen] == [
            [tokens[j] for j in r.top(mass.mean(0)[list(tokens)], count)] for tokens in events
        ]


def test_a_null_representative_is_worth_nothing():
    keys, chosen = np.array([[[0.0, 0], [0, 4.0]]]), [[0, 0], [1, 1]]
    assert known.unit_score([0, 1], keys, chosen, True) == pytest.approx(0.5)
    assert known.description(keys, chosen, True) == pytest.approx([0, 0.5])
