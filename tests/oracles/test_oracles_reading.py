"""Checks of the reading oracle itself: cases worked out by hand, and what always must hold."""

import numpy as np
import pytest

from oracles import reading
from oracles import retrieval as r
from oracles.common import attention

HEADS, KV_HEADS, D = 4, 2, 8
TURNS = [1.0, 0.3, 0.1, 0.01]
SIZES = dict(prompt=53, budget=26, sinks=3, local=8, window=7, chunk=4, representatives=2)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def random_text(n, seed=0, sharp=2.0):
    return noise(HEADS, n, D, seed=seed) * sharp, noise(KV_HEADS, n, D, seed=seed + 1), noise(KV_HEADS, n, D, seed=99)


def read(kind, q, k, v, **changes):
    return reading.replay_steps(kind, q, k, v, TURNS, None, **{**SIZES, **changes})


def ordinary(q, k, v):
    turned_q, turned_k = (reading.turned(x, range(x.shape[1]), TURNS) for x in (q, k))
    p = attention(turned_q, turned_k)
    return np.array([p[h] @ v[h // (HEADS // KV_HEADS)] for h in range(HEADS)]), p


# ---------------------------------------------------------------- the pieces


def test_windows_and_what_is_put_away():
    assert reading.windows(10, 12, 4) == [(0, 4), (4, 4), (8, 2), (10, 1), (11, 1)]
    assert reading.windows(8, 8, 4) == [(0, 4), (4, 4)]
    assert [reading.put_away(t, 0, 3, 8, 4) for t in (0, 14, 15, 18, 19)] == [0, 0, 4, 4, 8]
    assert reading.put_away(15, 8, 3, 8, 4) == 8
    assert [reading.put_away_in_decode(t, 0, 3, 8, 4) for t in (10, 11, 14, 15)] == [0, 4, 4, 8]
    assert reading.put_away_in_decode(14, 4, 3, 8, 4) == 4
    assert [reading.put_away_in_decode(t, 0, 3, 2, 4) for t in (8, 9, 12, 13)] == [0, 4, 4, 8]
    assert reading.fetched_units(26, 3, 8, 4, 99) == 3
    assert reading.fetched_units(26, 3, 8, 4, 2) == 2
    assert reading.fetched_units(9, 3, 8, 4, 2) == 0


def test_far_places_end_right_before_the_near_ones():
    assert reading.contiguous_places([0, 1, 7], 20) == [17, 18, 19]
    assert reading.contiguous_places(list(range(20)), 20) == list(range(20))


def test_the_probe_takes_the_question_while_reading_only():
    queries, question, so_far = noise(1, 16), noise(2, 16, seed=1), noise(9, 16, seed=2)
    so_far[-1] = queries[0]
    asked = reading.window_probe("actqkv", queries, so_far, question, decoding=False)
    assert asked == pytest.approx(r.probe([*queries, *question], *r.moments(so_far)))
    assert reading.window_probe("actqkv", queries, so_far, question, decoding=True).tolist() == queries[0].tolist()
    assert reading.window_probe("actqkv", queries, so_far, None, decoding=False) == pytest.approx(queries[0])
    assert reading.window_probe("infllm", queries, so_far, question, decoding=False) == pytest.approx(queries[0])


def test_qllm_adds_the_question_and_is_infllm_without_one():
    keys, chosen = np.array([[[1, 0], [3, 0], [0, 1], [0, 1]]]), [[[0], [1]], [[2], [3]]]
    asked = [[0, 1], [1, 2]]
    assert reading.chunk_scores("infllm", [1, 1], keys, chosen, None) == [2, 1]
    assert reading.chunk_scores("qllm", [1, 1], keys, chosen, None) == [2, 1]
    assert reading.chunk_scores("qllm", [1, 1], keys, chosen, asked, 4.0) == [2 + 4 * 1, 1 + 4 * 1.5]
    assert reading.chunk_scores("infllm", [1, 1], keys, chosen, asked, 4.0) == [2, 1]


def test_actqkv_adds_the_questions_cosine():
    keys, chosen = np.array([[[1, 0], [3, 0], [0, 1], [0, 1]]]), [[[0], [1]], [[2], [3]]]
    assert reading.chunk_scores("actqkv", [3, 4], keys, chosen, [[0, 1], [1, 2]]) == pytest.approx([0.6, 0.8])
    got = reading.chunk_scores("actqkv", [3, 4], keys, chosen, [[8, 0], [0, 6]], question_weight=0.5)
    assert got == pytest.approx([0.6 + 0.5 * 0.8, 0.8 + 0.5 * 0.6])


# ---------------------------------------------------------------- the whole


@pytest.mark.parametrize("kind", reading.KINDS)
def test_with_room_for_everything_it_is_ordinary_attention(kind):
    q, k, v = random_text(60)
    want, p = ordinary(q, k, v)
    for budget in (60, 1000):
        out, steps, votes = read(kind, q, k, v, budget=budget)
        np.testing.assert_allclose(out, want, atol=1e-12)
        assert all(step.chosen is None for step in steps)
        seen = np.array([p[:, j + 1 : j + 1 + SIZES["local"], j].sum(1) for j in range(60)]).T
        np.testing.assert_allclose(votes, seen if kind == "actqkv" else seen.mean(0), atol=1e-12)


def test_before_anything_can_be_put_away_it_is_ordinary_attention():
    q, k, v = random_text(60)
    out, steps, _ = read("actqkv", q, k, v, budget=20, local=60)  # the budget is passed, but all is local
    np.testing.assert_allclose(out, ordinary(q, k, v)[0], atol=1e-12)
    assert all(step.chosen is None and step.near == list(range(step.start)) for step in steps)


def test_tokenselect_that_fetches_all_is_ordinary_attention():
    q, k, v = random_text(40)
    # only the last window is past the budget of 39, and all 35 tokens before it still fit
    out, steps, _ = read("tokenselect", q, k, v, prompt=40, budget=39)
    assert steps[-1].chosen == list(range(35 - 3 - 8)) and steps[-2].chosen is None
    np.testing.assert_allclose(out, ordinary(q, k, v)[0], atol=1e-12)


@pytest.mark.parametrize("kind", reading.KINDS)
@pytest.mark.parametrize("changes", [{}, dict(budget=14), dict(sinks=0), dict(chunk=5, window=20), dict(window=1)])
def test_what_a_window_sees_is_within_the_budget(kind, changes):
    sizes = {**SIZES, **changes}
    _, steps, _ = read(kind, *random_text(60), **changes)
    unit = 1 if kind == "tokenselect" else sizes["chunk"]
    looked = 0
    for step in steps:
        before, decoded = step.start, int(step.start >= sizes["prompt"])
        assert len(step.far) + len(step.near) + decoded <= sizes["budget"]
        if step.chosen is None:
            assert step.far == [] and step.near == list(range(before))
            continue
        looked += 1
        assert step.start + step.size > sizes["budget"]
        least = sizes["local"] - unit if decoded else sizes["local"]
        assert least <= len(step.near) < least + unit
        assert step.far[: sizes["sinks"]] == list(range(sizes["sinks"])) and step.far == sorted(set(step.far))
        assert len(step.far) == sizes["sinks"] + len(step.chosen) * unit
        assert set(step.far).isdisjoint(step.near)
        assert sizes["sinks"] + step.put_away + len(step.near) == before
        assert len(step.scores) == step.put_away // unit
        near = sizes["local"] if decoded else len(step.near)
        room = sizes["budget"] - sizes["sinks"] - near - len(step.chosen) * unit
        assert room < unit or len(step.chosen) == step.put_away // unit
    assert looked > 5


def needle(n=60, at=21, asker=50):
    """Everything dull but one key, which the query of one token asks for, turned back by the edge it is turned to."""
    q, k, v = (noise(h, n, D, seed=i) * 0.01 for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    sought = noise(D, seed=7)
    k[:, at] = sought * 3
    q[:, asker] = [r.rotate(sought * 3, -SIZES["local"], TURNS)] * HEADS
    q[:, at + 2] = [r.rotate(sought * 3, -2, TURNS)] * HEADS  # a neighbour looks at it: it represents its chunk
    v[:, at] = 1.0
    return q, k, v


@pytest.mark.parametrize("kind", reading.KINDS)
@pytest.mark.parametrize("prompt", [55, 45])  # the asker is read in a window, or decoded
def test_the_obvious_chunk_is_fetched_and_read(kind, prompt):
    at, asker = 21, 50
    q, k, v = needle(at=at, asker=asker)
    out, steps, _ = read(kind, q, k, v, prompt=prompt, budget=18, representatives=1)
    (step,) = [step for step in steps if step.start <= asker < step.start + step.size]
    unit = 1 if kind == "tokenselect" else SIZES["chunk"]
    assert (at - SIZES["sinks"]) // unit in step.chosen and at in step.far
    assert int(np.argmax(step.scores)) == (at - SIZES["sinks"]) // unit
    if kind != "tokenselect":
        known = [[at] * HEADS] if kind == "actqkv" else [at]
        assert len(step.chosen) == 1 and step.representatives[(at - SIZES["sinks"]) // unit] == known
        assert out[:, asker].min() > 0.9
        assert abs(out[:, asker - 1]).max() < 0.2


def test_representatives_are_the_tokens_looked_at_by_the_queries_after_them():
    q, k, v = (np.zeros((h, 40, D)) for h in (HEADS, KV_HEADS, KV_HEADS))
    k[:, 9, 0] = 1.0  # chunk 1 is tokens 7 to 10
    q[:, 17, 0] = 40.0  # 8 after token 9: still within the local window
    still = [0.0] * 4
    sizes = {**SIZES, "prompt": 40, "representatives": 1, "budget": 15}
    _, steps, votes = reading.replay_steps("infllm", q, k, v, still, None, **sizes)
    assert steps[-1].representatives[1] == [9]
    assert votes[9] > 0.9
    q[:, 17, 0], q[:, 18, 0] = 0.0, 40.0  # 9 after it: too late to count
    _, steps, votes = reading.replay_steps("infllm", q, k, v, still, None, **sizes)
    assert votes[9] < 0.9


@pytest.mark.parametrize("per_head", [True, False])
def test_representatives_are_settled_when_the_chunk_goes(per_head):
    q, k, v = random_text(60)
    _, steps, votes = read("actqkv", q, k, v, per_head=per_head)
    looked = [step for step in steps if step.chosen is not None]
    for earlier, later in zip(looked, looked[1:], strict=False):
        assert later.representatives[: len(earlier.representatives)] == earlier.representatives
    for b, tokens in enumerate(looked[-1].representatives):
        first = SIZES["sinks"] + b * SIZES["chunk"]
        part = votes[..., first : first + SIZES["chunk"]]
        if per_head:
            assert np.array(tokens).T.tolist() == (first + np.argsort(-part)[:, :2]).tolist()
        else:
            assert tokens == [first + j for j in r.top(part, 2)]


def test_per_head_is_one_for_all_where_every_token_represents():
    q, k, v = random_text(60)
    for kind in ("actqkv", "infllm", "qllm"):
        one, other = (read(kind, q, k, v, representatives=4, per_head=per_head) for per_head in (True, False))
        np.testing.assert_allclose(one[0], other[0], atol=1e-12)
        assert [step.chosen for step in one[1]] == [step.chosen for step in other[1]]
        few, fewer = (read(kind, q, k, v, representatives=2, per_head=per_head) for per_head in (True, False))
        assert any(a.scores != pytest.approx(b.scores) for a, b in zip(few[1][-7:], fewer[1][-7:], strict=True))


@pytest.mark.parametrize("kind", ["actqkv", "infllm", "qllm"])
def test_outputs_are_those_of_the_plain_formula_in_any_order_of_the_far_tokens(kind):
    q, k, v = random_text(60)
    out, steps, _ = read(kind, q, k, v, question=noise(2, KV_HEADS * D, seed=5))
    for number, step in enumerate(step for step in steps if step.chosen is not None):
        far = np.random.default_rng(number).permutation(step.far)
        i = step.start + step.size - 1
        near = list(range(step.start - len(step.near), step.start + step.size))
        for h in range(HEADS):
            kh = h // (HEADS // KV_HEADS)
            want = r.retrieved_attention(
                q[h, i], i, k[kh, far], v[kh, far], k[kh, near], v[kh, near], near, SIZES["local"], TURNS, None
            )
            np.testing.assert_allclose(out[h, i], want, atol=1e-12)


def test_scores_are_those_of_the_plain_formulas():
    q, k, v = random_text(60)
    question = noise(2, KV_HEADS * D, seed=5)
    edge = [[r.rotate(x, SIZES["local"], TURNS) for x in head] for head in q]
    queries, keys = r.joined(edge, KV_HEADS), r.joined(k, KV_HEADS)
    for kind in ("actqkv", "qllm"):
        _, steps, _ = read(kind, q, k, v, question=question, per_head=False)
        read_last = [step for step in steps if step.start < SIZES["prompt"]][-1]
        for step in (read_last, steps[-1]):
            end, decoding = step.start + step.size, step is steps[-1]
            mine, tokens = queries[step.start : end], step.representatives
            if kind == "actqkv":
                both = np.concatenate([mine, question])
                weights = ((both - queries[:end].mean(0)) ** 2 / queries[:end].var(0)).sum(1)
                sought = mine[0] if decoding else weights @ both / weights.sum()
                unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
                want = [np.mean(unit[t] @ sought) / np.linalg.norm(sought) for t in tokens]
            else:
                want = [(mine.mean(0) + 4 * question.mean(0)) @ keys[t].mean(0) for t in tokens]
            assert step.scores == pytest.approx(want)


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_scores_per_head_are_those_of_the_plain_formulas(weight):
    q, k, v = random_text(60)
    question = noise(2, KV_HEADS * D, seed=5)
    _, steps, _ = read("actqkv", q, k, v, question=question, question_weight=weight)
    step, of_head = steps[-1], np.repeat(np.arange(KV_HEADS), HEADS // KV_HEADS)
    current = r.joined([[r.rotate(head[step.start], SIZES["local"], TURNS)] for head in q], KV_HEADS)[0]
    matches = []
    for sought in (current, question.mean(0)):
        long = sought.reshape(KV_HEADS, D)[of_head].ravel()  # the probe, once for every query head
        long = long / np.linalg.norm(long)
        keys = [[k[of_head, tokens].ravel() for tokens in chunk] for chunk in step.representatives]
        matches.append([np.mean([long @ key / np.linalg.norm(key) for key in chunk]) for chunk in keys])
    assert step.scores == pytest.approx(np.array(matches[0]) + weight * np.array(matches[1]))
    assert any(len(set(tokens)) > 1 for chunk in step.representatives for tokens in chunk)


def test_tokenselect_votes_and_places():
    q, k, v = random_text(60)
    out, steps, _ = read("tokenselect", q, k, v, budget=20)
    step = steps[-1]
    i, first_near = step.start, step.start + 1 - SIZES["local"]
    assert len(step.chosen) == 20 - 3 - 8
    places = list(range(first_near - len(step.far), i + 1))
    tokens = step.far + list(range(first_near, i + 1))
    votes = np.zeros(first_near - 3)
    for h in range(HEADS):
        kh = h // 2
        keys = np.array([r.rotate(k[kh, j], place, TURNS) for j, place in zip(tokens, places, strict=True)])
        p = np.exp(keys @ np.array(r.rotate(q[h, i], i, TURNS)) / D**0.5)
        np.testing.assert_allclose(out[h, i], p @ v[kh, tokens] / p.sum(), atol=1e-12)
        e = np.exp(k[kh, 3:first_near] @ np.array(r.rotate(q[h, i], SIZES["local"], TURNS)) / D**0.5)
        votes += e / e.sum()
    assert step.scores == pytest.approx(votes)
    assert step.chosen == r.top(votes, 9)


def test_ties_go_to_the_later_chunk_and_the_later_token():
    q, k, v = np.zeros((HEADS, 60, D)), np.zeros((KV_HEADS, 60, D)), noise(KV_HEADS, 60, D)
    for kind in reading.KINDS:
        _, steps, _ = read(kind, q, k, v)
        units, count = len(steps[-1].scores), len(steps[-1].chosen)
        assert steps[-1].chosen == list(range(units - count, units))


@pytest.mark.parametrize("kind", reading.KINDS)
def test_replay_gives_outputs_and_choices(kind):
    q, k, v = random_text(60)
    outputs, chosen = reading.replay(kind, q, k, v, TURNS, None, *SIZES.values())
    want, steps, _ = read(kind, q, k, v)
    assert outputs.shape == (HEADS, 60, D) and np.array_equal(outputs, want)
    assert chosen == [step.chosen for step in steps] and len(chosen) == 8 + 7


# ---------------------------------------------------------------- layers


def test_density_shares_use_the_mean_of_the_steps_before():
    thetas = [[1.0, 1.0], [3.0, 3.0], [2.0, 5.0], [1.0, 0.0]]
    # mean of layer 1: 3 (given), 1, (1+3)/2, (1+3+5)/3; the last layer takes what is left, even without any density
    shares = reading.density_shares(thetas, [9.0, 3.0], 80, 4)
    assert shares == [[20, 60], [60, 20], [40, 40], [20, 60]]


def test_equal_densities_share_equally_at_every_step():
    thetas = [[0.1, 0.1, 0.1, 0.1]] * 7
    assert reading.density_shares(thetas, [0.1] * 4, 4 * 12, 4) == [[12] * 4] * 7
