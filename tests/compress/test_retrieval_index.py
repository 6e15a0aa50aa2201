"""Entries of an index and their scores, against float64 oracles."""

import math

import numpy as np
import pytest
import torch
from draws import close, cut_up, draw, in_windows, many, noise, single, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracles import representatives as known
from oracles import retrieval as r
from oracles.common import top

from kvkeep.compress.retrieval.chunking import renumber_units
from kvkeep.compress.retrieval.index import (
    NEG_INF,
    Bounds,
    Centres,
    EachToken,
    OffloadedTokens,
    Representatives,
    RetrievalQuery,
    ranked_in_units,
)
from kvkeep.kernels.torch.retrieval_units import weighted_query


@pytest.mark.core
@many(100)
def test_the_best_of_each_unit(seed):
    rng = np.random.default_rng(seed)
    n, count = int(rng.integers(1, 40)), int(rng.choice([1, 2, 4, 50]))
    member = cut_up(rng, n)
    scores = rng.integers(0, 3, n).astype(float) if seed % 2 else noise(rng, n)
    want = sorted(tokens[i] for tokens in tokens_of(member) for i in top(scores[tokens], count))
    got = ranked_in_units(single(scores)[None], torch.from_numpy(member), member.max() + 1, count)
    assert got[got >= 0].sort().values.tolist() == want


@pytest.mark.core
@many(60)
def test_the_best_of_each_unit_to_every_head(seed):
    rng = np.random.default_rng(seed)
    n, count, heads = int(rng.integers(1, 40)), int(rng.choice([1, 2, 4, 50])), int(rng.integers(1, 5))
    member = cut_up(rng, n)
    mass = rng.integers(0, 3, (heads, n)).astype(float) if seed % 2 else noise(rng, heads, n)
    got = ranked_in_units(single(mass), torch.from_numpy(member), member.max() + 1, count)
    units = tokens_of(member)
    assert got.shape == (heads, len(units), min(count, max(map(len, units))))
    for unit, tokens in enumerate(units):
        mine = got[:, unit, : min(count, len(tokens))].tolist()
        assert got[:, unit, len(mine[0]) :].eq(-1).all()
        if count < len(tokens):
            assert mine == [known.ranked(row, tokens, count) for row in mass]
        else:  # nobody chooses
            assert all(row == mine[0] and sorted(row) == tokens.tolist() for row in mine)


@pytest.mark.core
def test_the_best_of_units_that_nobody_is_in():
    got = ranked_in_units(torch.tensor([[1.0, 1.0, 2.0, 0.0]]), torch.tensor([3, 3, 1, 1]), 6, 1)
    assert got.tolist() == [[[-1], [2], [-1], [1], [-1], [-1]]]


def reversed_probe(window, mean, variance):
    """ActQKV, appendix D.3: weights 1 / the sum of a query's bias."""
    weights = [1 / max(w, 1e-30) for w in r.activation(window, mean, variance)]
    return np.array([r.dot(weights, column) / math.fsum(weights) for column in zip(*window, strict=True)])


INDEXES = {
    "infllm": Representatives(),
    "infllm, one each": Representatives(count=1),
    "qllm": Representatives(count=2, weight=4.0),
    "actqkv": Representatives(count=3, cosine=True, bias=True, question_in_window=True),
    "actqkv, mean probe": Representatives(count=50, cosine=True),
    "infllm, by head": Representatives(per_head=True),
    "qllm, by head": Representatives(count=2, weight=4.0, per_head=True),
    "actqkv, by head": Representatives(count=3, cosine=True, bias=True, question_in_window=True, per_head=True),
    "actqkv, by head, asked": Representatives(
        count=1, cosine=True, bias=True, question_in_window=True, weight=0.7, per_head=True
    ),
    "actqkv, all by head": Representatives(count=50, cosine=True, per_head=True),
    "actqkv, reversed": Representatives(
        count=2, cosine=True, bias=True, question_in_window=True, per_head=True, reverse=True
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("asked", ["nobody asks", "reading", "writing"])
@pytest.mark.parametrize("name", INDEXES)
@many(12)
def test_representatives(name, asked, seed):
    index, (rng, q, k) = INDEXES[name], draw(seed)
    kv_heads, n, dim = k.shape
    member, question = cut_up(rng, n), None if asked == "nobody asks" else noise(rng, 3, kv_heads * dim)
    mass = rng.random((len(q), n)).astype(np.float32).astype(float)
    if seed % 3 == 0:
        mass = rng.integers(0, 3, (len(q), n)).astype(float)
    if not index.per_head:
        mass = np.repeat(mass[:1], len(q), 0)  # as if their mean
    if seed % 5 == 0:
        k[:, rng.integers(n)] = 0.0
    so_far = np.concatenate([noise(rng, int(rng.integers(0, 20)), kv_heads * dim), r.joined(q, kv_heads)])

    speakers = [known.representatives(mass, t.tolist(), index.count, index.per_head) for t in tokens_of(member)]
    window = list(r.joined(q, kv_heads))
    if question is not None and asked == "reading" and index.bias:
        window += list(question)
    sought = r.probe(window, *r.moments(so_far)) if index.bias else r.mean_probe(window)
    if index.reverse:
        sought = reversed_probe(window, *r.moments(so_far))
    want = known.unit_scores(sought, k, speakers, index.cosine)
    if question is not None and index.weight:
        want = np.add(
            want, index.weight * np.array(known.unit_scores(r.mean_vector(question), k, speakers, index.cosine))
        )

    units = torch.from_numpy(member)[None]
    about = index.build(OffloadedTokens(single(k), single(mass if index.per_head else mass[0]), units, len(speakers)))
    question = None if question is None else single(question)
    weighted = None
    if index.bias:
        earlier = so_far[: -q.shape[1]]
        moments = in_windows(rng, earlier) if len(earlier) else None
        before = (moments.count, moments.mean, moments.variance) if moments else (0, None, None)
        in_window = question if asked == "reading" else None
        weighted = weighted_query(single(q), kv_heads, *before, in_window, index.reverse)[2]
    asking = RetrievalQuery(single(q), kv_heads, dim**-0.5, question, weighted)
    score = index.score(asking, about, units.new_ones(1, len(speakers)))
    assert about.shape == (1, len(speakers), kv_heads * dim) and score.shape == (1, len(speakers))
    close(score[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.core
@pytest.mark.parametrize("index", [*INDEXES.values(), Bounds(), Centres()], ids=[*INDEXES, "quest", "centres"])
@many(12)
def test_equal_stretches_are_described_as_any_units(index, seed):
    """Bit by bit, or choices could differ."""
    rng = np.random.default_rng(seed)
    size, count, heads = int(rng.choice([1, 4, 9, 15])), int(rng.integers(1, 9)), int(rng.integers(1, 4))
    keys = single(noise(rng, heads, size * count, 8)).to([torch.float32, torch.bfloat16][seed % 2])
    shape = (heads * int(rng.integers(1, 4)), size * count) if getattr(index, "per_head", False) else size * count
    mass = single(rng.integers(0, 3, shape) if seed % 3 else rng.random(shape))
    member = (torch.arange(size * count) // size)[None]
    got, want = (index.build(OffloadedTokens(keys, mass, units, count)) for units in (None, member))
    assert got.equal(want) and OffloadedTokens(keys, mass, None, count).units.equal(member)


def ask(q, k, scale=None):
    return RetrievalQuery(single(q), len(k), scale or k.shape[-1] ** -0.5)


def build_index(index, k, member):
    """What an index knows of keys in these units. member [1 or kv_heads, n]"""
    return index.build(OffloadedTokens(single(k), None, torch.from_numpy(member), int(member.max()) + 1))


@pytest.mark.core
@many(60)
def test_every_token_by_votes(seed):
    rng, q, k = draw(seed)
    n, scale = k.shape[1], float(rng.choice([1.0, 0.25]))
    ends = sorted({*rng.integers(0, n, 3).tolist(), n} - {0})
    blocks = [single(k[:, first:last]) for first, last in zip([0, *ends], ends, strict=False)]
    score = EachToken().score(ask(q, k, scale), blocks, torch.ones(1, n))
    assert EachToken().build(OffloadedTokens(single(k), None, torch.zeros(1, n), 1)) is None
    close(score, [r.tokenselect_votes(q, k, scale)])


@pytest.mark.core
@many(60)
def test_page_bounds(seed):
    rng, q, k = draw(seed)
    page = int(rng.choice([1, 2, 5, 16]))
    member = (np.arange(k.shape[1]) // page)[None]
    score = Bounds().score(ask(q, k), build_index(Bounds(), k, member), torch.ones(1))
    query = np.array([r.mean_vector(head) for head in q])
    close(score, r.quest_scores(query, k, page))


@pytest.mark.core
@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(st.data())
def test_no_product_exceeds_the_bound(data):
    """Worth >= mean over the group's heads of the largest q·k >= largest product of their mean query with a key.

    With one query head per KV head that is the bound itself. With more it does not bound the best head's product.
    """
    group, kv_heads, n, dim = (data.draw(st.integers(1, most)) for most in (3, 2, 6, 4))
    numbers = st.floats(-100, 100, width=32)
    q = data.draw(arrays(np.float32, (group * kv_heads, 1, dim), elements=numbers)).astype(np.float64)
    k = data.draw(arrays(np.float32, (kv_heads, n, dim), elements=numbers)).astype(np.float64)
    score = Bounds().score(ask(q, k), build_index(Bounds(), k, np.zeros((1, n), dtype=int)), torch.ones(1))[:, 0]
    maxima = r.over_group(r.quest_maxima(q[:, 0], k), kv_heads)
    room = 1e-6 * dim * np.abs(q).max() * np.abs(k).max() + 1e-37  # below it float32 has fewer digits
    means = q[:, 0].reshape(kv_heads, group, dim).mean(1)
    for head in range(kv_heads):
        assert score[head] + room >= maxima[head] >= r.quest_maxima(means, k)[head] - room


@pytest.mark.core
def test_the_bound_of_a_group_is_not_that_of_its_best_head():
    q, k = np.array([[[1.0]], [[-1.0]]]), np.ones((1, 2, 1))
    assert Bounds().score(ask(q, k), build_index(Bounds(), k, np.zeros((1, 2), dtype=int)), torch.ones(1)).tolist() == [
        [0]
    ]
    assert r.quest_maxima(q[:, 0], k) == [1, -1]


def centred(rng, k):
    """Units per KV head (some heads may have nobody in one), their centres and their sizes."""
    kv_heads, n, dim = k.shape
    if rng.random() < 0.5:
        member = np.stack([cut_up(rng, n)] * kv_heads)
    else:
        member = renumber_units(torch.from_numpy(rng.integers(0, max(1, n // 2), (kv_heads, n)))).numpy()
    units = int(member.max()) + 1
    sizes = np.array([np.bincount(row, minlength=units) for row in member])
    centres = np.zeros((kv_heads, units, dim))
    for h, row in enumerate(member):
        for unit in set(row):
            centres[h, unit] = r.mean_vector(k[h][row == unit])
    return member, centres, sizes


@pytest.mark.core
@many(60)
def test_centres(seed):
    rng, q, k = draw(seed)
    member, centres, sizes = centred(rng, k)
    about = build_index(Centres(), k, member)
    close(about, centres)
    group, query = len(q) // len(k), [r.mean_vector(head) for head in q]
    want = [r.sentence_scores(x, centres[h // group]) for h, x in enumerate(query)]
    want = [[s * 0.5 for s in r.over_group(unit, len(k))] for unit in zip(*want, strict=True)]
    close(Centres().score(ask(q, k, 0.5), about, torch.from_numpy(sizes)), np.transpose(want))


def estimates(q, centres, sizes, scale):
    """[kv_heads, units]"""
    group = len(q) // len(centres)
    each = [
        r.squeezed_scores(r.mean_vector(head), centres[h // group], sizes[h // group], scale)
        for h, head in enumerate(q)
    ]
    return np.transpose([r.over_group(unit, len(centres)) for unit in zip(*each, strict=True)])


@pytest.mark.core
@many(60)
def test_estimates_and_their_threshold(seed):
    rng, q, k = draw(seed)
    member, centres, sizes = centred(rng, k)
    about, want = build_index(Centres(), k, member), estimates(q, centres, sizes, 1.0)
    real = sizes > 0
    got = Centres(estimate=True).score(ask(q, k, 1.0), about, torch.from_numpy(sizes))
    close(got[torch.from_numpy(real)], want[real])
    close((got * torch.from_numpy(sizes)).sum(1), np.ones(len(k)))

    threshold = float(rng.choice([0.3, 0.9, 1.5]))
    share = want * k.shape[1]  # 1: as much as in an even softmax
    got = Centres(True, threshold).score(ask(q, k, 1.0), about, torch.from_numpy(sizes))
    for h, row in enumerate(got.tolist()):
        kept = [unit for unit in np.flatnonzero(real[h]) if row[unit] != NEG_INF]
        clear = [unit for unit in np.flatnonzero(real[h]) if abs(share[h, unit] - threshold) > 1e-5]
        wanted = set(r.squeezed_kept(share[h], threshold))
        assert {unit for unit in kept if unit in clear} == {unit for unit in clear if unit in wanted}
        assert threshold > 1 or kept, "some unit is always above an even share, or at it"


@pytest.mark.core
def test_a_unit_nobody_is_in_takes_no_part_in_the_estimate():
    q, k = np.full((1, 1, 4), 10.0), np.stack([np.full((3, 4), -5.0), np.full((3, 4), -5.1)]).reshape(1, 6, 4)
    index, sizes = Centres(estimate=True, threshold=0.5), torch.tensor([[3, 0, 3]])
    about = build_index(index, k, np.array([[0, 0, 0, 2, 2, 2]]))
    want = estimates(q, about.double().numpy(), sizes.numpy(), 0.5)
    close(index.score(ask(q, k, 0.5), about, sizes)[0, 0], want[0, 0])
