"""The parts of retrieval, each against its plain-loop float64 oracle, and the store against plain indexing."""

import errno
import inspect
import math
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracles import reading
from oracles import representatives as known
from oracles import retrieval as r
from oracles.common import attention, top

import kvkeep
from kvkeep.cache.rope_shift import RopeShift
from kvkeep.compress.parse import parse
from kvkeep.compress.retrieval.chunking import (
    Chunks,
    Clusters,
    Events,
    SentenceChunks,
    _modularity,
    boundaries,
    kmeans,
    refine_boundaries,
    renumber_units,
    similarity,
    split_spans,
)
from kvkeep.compress.retrieval.index import (
    NEG_INF,
    Bounds,
    Centres,
    EachToken,
    OffloadedTokens,
    Representatives,
    RetrievalQuery,
    chosen_in_units,
    ranked_in_units,
)
from kvkeep.compress.retrieval.query import Moments, activation_bias, concat_heads
from kvkeep.compress.retrieval.topk import density_share, score_entropy, select_uniform_units, select_units
from kvkeep.errors import BadParameter, StoreFull
from kvkeep.model.rope import Rotation
from kvkeep.storage.offload import disk as spilling
from kvkeep.storage.offload import pinned
from kvkeep.storage.offload.disk import DiskStore
from kvkeep.storage.offload.host import HostMemoryBudget, HostStore, runs
from kvkeep.storage.offload.layer_state import AppendBuffer, LayerState, Retrieved
from kvkeep.storage.offload.pinned import Arena

HEADS = [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1), (3, 3)]
LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34]
CPU = torch.device("cpu")


def many(draws):
    """One test on so many random draws; a failure names its seed."""

    def decorate(test):
        @wraps(test)
        def run(**given):
            for seed in range(draws):
                try:
                    test(seed=seed, **given)
                except Exception as error:
                    raise AssertionError(f"with seed={seed}") from error

        known = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature([p for p in known if p.name != "seed"])
        return run

    return decorate


def noise(rng, *shape, mean=0.0, scale=1.0):
    """Normal numbers that float32 holds exactly, as float64."""
    return (mean + scale * rng.standard_normal(shape)).astype(np.float32).astype(np.float64)


def single(array):
    return torch.tensor(np.asarray(array), dtype=torch.float32)


def draw(seed):
    """A generator, and random queries and keys; some keys come twice."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    n, dim, w = LENGTHS[seed % len(LENGTHS)], int(rng.choice([1, 3, 4, 8])), int(rng.choice([1, 2, 7]))
    q, k = noise(rng, heads, w, dim), noise(rng, kv_heads, n, dim)
    if seed % 4 == 0:
        k[:, n // 2 : n // 2 * 2] = k[:, : n // 2]
    return rng, q, k


def cut_up(rng, n):
    """The unit of each token: stretches with a short last one, or scattered units of any size."""
    if rng.random() < 0.5:
        return np.arange(n) // int(rng.choice([1, 2, 5, n, n + 1]))
    return np.unique(rng.integers(0, max(1, n // 3), n), return_inverse=True)[1]


def tokens_of(member):
    return [np.flatnonzero(member == unit) for unit in range(member.max() + 1)]


def close(got, want, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(np.asarray(got, dtype=np.float64), np.asarray(want), rtol=rtol, atol=atol)


# ---------------------------------------------------------------- probes


def in_windows(rng, vectors):
    """Moments brought up to date window by window, wherever the windows end."""
    ends = sorted({*rng.integers(1, len(vectors) + 1, rng.integers(0, 6)).tolist(), len(vectors)})
    known = None
    for first, last in zip([0, *ends], ends, strict=False):
        mine = Moments.of(single(vectors[first:last]))
        known = known.merge(mine) if known else mine
    return known


@pytest.mark.core
@many(60)
def test_moments_in_any_split(seed):
    rng = np.random.default_rng(seed)
    vectors = noise(rng, int(rng.integers(1, 50)), int(rng.integers(1, 9)), scale=10.0 ** rng.integers(-3, 4))
    found, (mean, variance) = in_windows(rng, vectors), r.moments(vectors)
    size = np.abs(vectors).max()
    assert found.count == len(vectors)
    close(found.mean / size, mean / size)
    close(found.variance / size**2, variance / size**2)


@pytest.mark.core
@many(50)
def test_moments_of_numbers_far_from_nought(seed):
    rng = np.random.default_rng(seed)
    vectors = noise(rng, int(rng.integers(20, 120)), 4, mean=1e4)
    found, (_, variance) = in_windows(rng, vectors), r.moments(vectors)
    close(found.variance, variance, rtol=1e-2)
    naive = (single(vectors) ** 2).mean(0) - single(vectors).mean(0) ** 2
    assert (naive - single(variance)).abs().max() > 0.1, "sums of squares would do: the test shows nothing"


@pytest.mark.core
@many(60)
def test_joined(seed):
    _, q, k = draw(seed)
    close(concat_heads(single(q), len(k)), r.joined(q, len(k)))
    close(concat_heads(single(k), len(k)), r.joined(k, len(k)))


@pytest.mark.core
@pytest.mark.parametrize("kind", ["plain", "some never vary", "far from nought", "all equal", "nothing ever varies"])
@many(25)
def test_the_probe_of_surprising_queries(kind, seed):
    rng = np.random.default_rng(seed)
    w, dim = int(rng.integers(1, 9)), int(rng.integers(1, 8))
    so_far = noise(rng, w + int(rng.integers(0, 40)), dim, mean=100.0 * (kind == "far from nought"))
    if kind == "some never vary":
        so_far[:, :: 1 + seed % 2] = np.float32(0.1)
    if kind == "all equal":
        so_far[-w:] = so_far[-1]
    if kind == "nothing ever varies":
        so_far[:] = so_far[0]
    got = activation_bias(single(so_far[-w:]), in_windows(rng, so_far))
    close(got, r.probe(so_far[-w:], *r.moments(so_far)), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- representatives


@pytest.mark.core
@many(100)
def test_the_best_of_each_unit(seed):
    rng = np.random.default_rng(seed)
    n, count = int(rng.integers(1, 40)), int(rng.choice([1, 2, 4, 50]))
    member = cut_up(rng, n)
    scores = rng.integers(0, 3, n).astype(float) if seed % 2 else noise(rng, n)
    want = sorted(tokens[i] for tokens in tokens_of(member) for i in top(scores[tokens], count))
    got = chosen_in_units(single(scores), torch.from_numpy(member), member.max() + 1, count)
    assert got.nonzero()[:, 0].tolist() == want


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
    got = chosen_in_units(torch.tensor([1.0, 1.0, 2.0, 0.0]), torch.tensor([3, 3, 1, 1]), 6, 1)
    assert got.tolist() == [False, True, True, False]


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
    moments = in_windows(rng, so_far) if index.bias else None
    asking = RetrievalQuery(single(q), kv_heads, dim**-0.5, moments, question, asked == "reading")
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


@pytest.mark.core
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@many(8)
def test_turns_are_the_rotations(interleaved, kind, seed):
    rng = np.random.default_rng(seed)
    n, pairs, rest, first = int(rng.integers(1, 9)), int(rng.choice([1, 4])), int(rng.choice([0, 2])), 1000 * seed
    turn = Rotation(torch.rand(pairs, generator=torch.Generator().manual_seed(seed)), interleaved)
    vectors = single(noise(rng, 3, n, 2 * pairs + rest)).to(kind)
    shift, where = RopeShift({0: turn, 1: turn, 2: None}), torch.arange(first, first + n)
    for layer in (0, 1):
        assert shift.unrotate(layer, vectors, first).equal(turn.rotate(vectors, -where))
        assert shift.rotate(layer, vectors, first).equal(turn.rotate(vectors, where))
        twice = turn.rotate(turn.rotate(vectors, -where), torch.full((n,), 7))
        assert shift.rotate_to(layer, vectors, first, 7).equal(twice)
    assert len(shift.angles) == 3 and shift.unrotate(2, vectors, first) is vectors
    shift.begin()
    assert not shift.angles


# ---------------------------------------------------------------- tokens, pages, centres


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

    With one query head per key head that is the bound itself. With more it does not bound the best head's product.
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
    """Units per key head (some heads may have nobody in one), their centres and their sizes."""
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


# ---------------------------------------------------------------- clusters


def margin(k, centres):
    """How much more alike the best centre is than the next, for the key that is least sure."""
    if len(centres) == 1:
        return math.inf
    alike = np.sort([[r.cosine(key, centre) for centre in centres] for key in k], axis=1)
    return (alike[:, -1] - alike[:, -2]).min()


@pytest.mark.core
def test_kmeans():
    """Only where float32 can tell the best centre from the next in every round: margins above 1e-5 in float64."""
    compared = 0
    for seed in range(90):
        rng = np.random.default_rng(seed)
        heads, n, dim = (int(rng.choice(sizes)) for sizes in ([1, 2, 3], [1, 2, 5, 9, 17], [2, 3, 5]))
        count, iterations = int(rng.integers(1, min(n, 4) + 1)), int(rng.choice([0, 1, 2, 6]))
        keys, first = noise(rng, heads, n, dim), sorted(rng.choice(n, count, replace=False).tolist())
        member, centres = kmeans(single(keys), torch.tensor(first), iterations)
        for h in range(heads):
            rounds = [r.kmeans(keys[h], count, i, first) for i in range(iterations + 1)]
            if min(margin(keys[h], found) for _, found in rounds[: max(1, iterations)]) > 1e-5:
                compared += 1
                assert member[h].tolist() == rounds[-1][0]
                close(centres[h], rounds[-1][1])
    assert compared >= 150


@pytest.mark.core
def test_kmeans_of_equals():
    keys = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [4.0, 0.0]]])
    first = [0, 1, 2]  # two centres alike: the lower number has all, the other keeps its place; so for a null key
    member, centres = kmeans(keys, torch.tensor(first), 3)
    want = r.kmeans(keys[0].double().numpy(), 3, 3, first)
    assert member[0].tolist() == want[0] == [0, 0, 2, 0, 0]
    close(centres[0], want[1])


@pytest.mark.core
@pytest.mark.parametrize("n", [1, 2, 79, 80, 160, 500])
def test_clusters_are_the_same_every_time(n):
    keys = torch.randn(2, n, 16, generator=torch.Generator().manual_seed(n))
    first, again = (Clusters().members(keys, None, 4096) for _ in range(2))
    assert first.equal(again) and first.shape == (2, n) and int(first.max()) < max(1, n // 80)
    pairs = [kmeans(keys, torch.arange(min(n, 5)), 20) for _ in range(2)]
    assert all(a.equal(b) for a, b in zip(*pairs, strict=True))


@pytest.mark.core
@many(50)
def test_compacted(seed):
    rng = np.random.default_rng(seed)
    member = rng.integers(0, int(rng.integers(1, 30)), (int(rng.integers(1, 4)), int(rng.integers(1, 20))))
    numbers = sorted(set(member.flatten().tolist()))
    want = [[numbers.index(unit) for unit in row] for row in member.tolist()]
    assert renumber_units(torch.from_numpy(member)).tolist() == want


# ---------------------------------------------------------------- events and sentences


@pytest.mark.core
@many(80)
def test_boundaries(seed):
    rng = np.random.default_rng(seed)
    n, window, gamma = (
        int(rng.integers(0, 60)),
        int(rng.choice([1, 2, 7, 100])),
        float(rng.choice([-0.5, 0.0, 1.0, 2.0])),
    )
    surprise = rng.integers(0, 3, n).astype(float) if seed % 4 == 0 else np.abs(noise(rng, n))
    if seed % 7 == 0:
        surprise[:] = np.float32(0.1)
    assert boundaries(surprise.tolist(), gamma, window) == r.emllm_boundaries(surprise, gamma, window)


@pytest.mark.core
def test_boundaries_by_hand():
    # before token 3: mean 1, no spread; before 4: mean 2, std sqrt(3); before 5: mean 3.2, std of 1 1 1 5 8 is 2.85
    assert boundaries([1.0, 1.0, 1.0, 5.0, 8.0, 5.0], 1.0, 10) == [0, 3, 4]
    assert boundaries([1.0, 1.0, 1.0, 5.0, 8.0, 5.0], 1.0, 1) == [0, 3, 4]
    assert boundaries([], 1.0, 3) == [] and boundaries([9.0], 1.0, 3) == [0]


def graphs(seed):
    """Keys, and the oracle's graph of them; a third has whole numbers, so that equals are equal."""
    rng = np.random.default_rng(seed)
    heads, n, dim = int(rng.integers(1, 3)), int(rng.integers(1, 16)), int(rng.integers(1, 4))
    k = rng.integers(0, 2, (heads, n, dim)).astype(float) if seed % 3 == 0 else noise(rng, heads, n, dim)
    return rng, k, r.similarity(r.joined(k, heads))


@pytest.mark.core
@many(60)
def test_similarity_and_modularity(seed):
    rng, k, graph = graphs(seed)
    found = similarity(single(k))
    close(found, graph, rtol=1e-12, atol=1e-12)
    n = len(graph)
    begin = int(rng.integers(0, n))
    end = int(rng.integers(begin + 1, n + 1))
    if end - begin < 2:
        return
    sums = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    sums[1:, 1:] = found.cumsum(0).cumsum(1)
    cuts = range(begin + 1, end)
    part = graph[begin:end, begin:end]
    want = [r.modularity(part, [a >= split for a in range(begin, end)]) for split in cuts]
    got = _modularity(sums, begin, end, torch.tensor(list(cuts))).tolist()
    assert want[got.index(max(got))] == pytest.approx(max(want), abs=1e-9)
    if abs(part.sum()) > 1e-3:
        close(got, want, rtol=1e-6, atol=1e-9)


@pytest.mark.core
@many(80)
def test_refined(seed):
    rng, k, graph = graphs(seed)
    n = len(graph)
    starts = (
        [0, *sorted(rng.choice(np.arange(1, n), int(rng.integers(0, n)), replace=False).tolist())] if n > 1 else [0]
    )
    assert refine_boundaries(starts, similarity(single(k))) == r.refine(starts, graph)


@pytest.mark.core
def test_a_boundary_moves_back_to_where_the_keys_change():
    keys = torch.eye(3)[[0] * 5 + [1] * 4 + [2] * 6][None]
    assert refine_boundaries([0, 7, 12], similarity(keys)) == [0, 5, 9]
    assert refine_boundaries([0, 3], similarity(torch.ones(1, 8, 2))) == [0, 3]  # all alike: the later of equals


def stretched(ends, longest):
    """Plain counting: a new unit after every end, and whenever one is full."""
    unit, size, out = 0, 0, []
    for end in ends:
        if size == longest:
            unit, size = unit + 1, 0
        out.append(unit)
        size += 1
        if end:
            unit, size = unit + 1, 0
    return out


@pytest.mark.core
@many(80)
def test_stretches(seed):
    rng = np.random.default_rng(seed)
    ends = rng.random(int(rng.integers(1, 60))) < rng.choice([0.0, 0.1, 0.5, 1.0])
    longest = int(rng.choice([1, 2, 7, 100]))
    assert split_spans(torch.from_numpy(ends), longest).tolist() == stretched(ends, longest)


@pytest.mark.core
@many(60)
def test_sentences_are_the_same_however_the_text_arrives(seed):
    rng = np.random.default_rng(seed)
    n, budget, chunking = (
        int(rng.integers(1, 200)),
        int(rng.choice([8, 32, 64])),
        SentenceChunks(int(rng.choice([1, 5, 128]))),
    )
    marks, keys = torch.from_numpy(rng.random(n) < rng.choice([0.0, 0.05, 0.3])).float(), torch.zeros(1, n, 1)
    gone, units = 0, []
    for seen in sorted({*rng.integers(1, n + 1, 5).tolist(), n}):
        ready = chunking.num_ready(marks[gone:], seen - gone, budget)
        assert 0 <= ready <= seen - gone < ready + chunking.size(budget)  # none waits longer than the longest
        if ready:
            here = slice(gone, gone + ready)
            member = chunking.members(keys[:, here], marks[here], budget)[0]
            units += np.bincount(member).tolist()
            gone += ready
    whole = np.bincount(stretched(marks > 0, chunking.size(budget))).tolist()
    assert units == whole[: len(units)] and sum(whole[len(units) :]) == n - gone


@pytest.mark.core
def test_a_megabyte_without_a_full_stop():
    chunking, marks = SentenceChunks(), torch.zeros(2**20)
    assert chunking.num_ready(marks, len(marks), 2048) == len(marks) and chunking.num_ready(marks, 127, 2048) == 0
    sizes = chunking.members(torch.zeros(1, len(marks), 1), marks, 2048)[0].bincount()
    assert sizes.max() == sizes.min() == 128


@pytest.mark.core
def test_chunks_go_whole():
    assert [Chunks(5).num_ready(None, waiting, 64) for waiting in (0, 4, 5, 14)] == [0, 0, 5, 10]
    assert [Chunks().size(budget) for budget in (1, 16, 4096)] == [1, 2, 32]
    assert Chunks(5).members(torch.zeros(2, 12, 1), None, 64).tolist() == [[0] * 5 + [1] * 5 + [2] * 2]


@pytest.mark.core
@many(60)
def test_events(seed):
    rng = np.random.default_rng(seed)
    budget = int(rng.choice([40, 100, 400]))
    chunking = Events(float(rng.choice([0.0, 1.0])), longest=20, shortest=1, refine=bool(seed % 2))
    n = int(rng.integers(1, min(24, chunking.size(budget)) + 1))
    k, surprise = noise(rng, 2, n, 3), np.abs(noise(rng, n))
    starts = r.emllm_boundaries(surprise, chunking.gamma, n)
    if chunking.refine:
        starts = r.refine(starts, r.similarity(r.joined(k, 2)))
    ends = [t + 1 in starts for t in range(n)]
    want = stretched(ends, max(1, chunking.size(budget) // 4))
    assert chunking.members(single(k), single(surprise), budget).tolist() == [want]


@pytest.mark.core
@many(50)
def test_events_are_neither_long_nor_short(seed):
    rng = np.random.default_rng(seed)
    chunking, n = Events(0.5, longest=30, shortest=6), int(rng.integers(1, 120))
    k, surprise = single(noise(rng, 2, n, 3)), single(np.abs(noise(rng, n)))
    sizes = chunking.members(k, surprise, 4096)[0].bincount().tolist()
    free = Events(0.5, longest=30, shortest=1).members(k, surprise, 4096)[0]
    assert sum(sizes) == n and min(sizes) > 0 and max(sizes) <= 30
    begins = np.cumsum([0, *sizes])
    allowed = {0, *(free[1:] != free[:-1]).nonzero()[:, 0].add(1).tolist()}
    for i, begin in enumerate(begins[1:-1].tolist()):
        assert begin in allowed or begin - begins[i] == 30
        assert sizes[i] >= 6 or any(begin - b == 30 + sizes[i] for b in begins)  # what is left of one cut by length


@pytest.mark.core
def test_an_event_ends_with_its_piece():
    chunking, budget = Events(), 400
    piece = chunking.size(budget)
    rng = np.random.default_rng(0)
    k, surprise = single(noise(rng, 2, 2 * piece, 4)), single(np.abs(noise(rng, 2 * piece)))
    assert chunking.num_ready(surprise, 2 * piece, budget) == 2 * piece
    member = chunking.members(k, surprise, budget)[0]
    assert member[piece - 1] != member[piece]


# ---------------------------------------------------------------- fetching


def spent(score, sizes, quota):
    """Tokens of one head, counted unit after unit."""
    starts = np.cumsum(sizes) - sizes
    members = [range(first, first + size) for first, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    taken = r.clusters_until(score, sizes.tolist(), quota)
    return sorted(t for tokens, count in zip(members, taken, strict=True) for t in list(tokens)[:count])


@pytest.mark.core
@many(100)
def test_units_until_the_quota_is_spent(seed):
    rng = np.random.default_rng(seed)
    heads, units = int(rng.integers(1, 5)), int(rng.integers(1, 12))
    total = int(rng.integers(1, 40))
    sizes = rng.multinomial(total, np.ones(units) / units, heads)
    score = rng.integers(0, 3, (heads, units)).astype(float) if seed % 2 else noise(rng, heads, units)
    quota = int(rng.choice([0, 1, total // 2, total - 1, total, 10 * total]))
    got = select_units(single(score), torch.from_numpy(sizes), quota)
    assert got.lengths == (min(quota, total),) * heads
    assert got.tolist() == [spent(*head, quota) for head in zip(score, sizes, strict=True)]
    if np.all(sizes > 0):  # every unit has an end: ties by it are ties by number
        starts = (np.cumsum(sizes, 1) - sizes).tolist()
        members = [
            [list(range(a, a + n)) for a, n in zip(*head, strict=True)]
            for head in zip(starts, sizes.tolist(), strict=True)
        ]
        assert got.tolist() == [r.tokens_until(score[h], members[h], quota) for h in range(heads)]


@pytest.mark.core
@many(50)
def test_units_that_are_not_wanted(seed):
    rng = np.random.default_rng(seed)
    heads, units, size = int(rng.integers(1, 4)), int(rng.integers(1, 9)), int(rng.integers(1, 4))
    score, sizes = noise(rng, heads, units), np.full((heads, units), size)
    score[rng.random((heads, units)) < 0.5] = NEG_INF
    quota = int(rng.integers(0, units * size + 5))
    most = min(quota, int((score != NEG_INF).sum(1).max()) * size)  # heads hold equally many: as the keenest
    got = select_units(single(score), torch.from_numpy(sizes), quota).tolist()
    assert got == [spent(*head, most) for head in zip(score, sizes, strict=True)]


@pytest.mark.core
@many(60)
def test_equal_units_are_spent_as_any(seed):
    rng = np.random.default_rng(seed)
    heads, units, size = int(rng.integers(1, 4)), int(rng.integers(1, 9)), int(rng.integers(1, 4))
    score = single(noise(rng, heads, units) if seed % 2 else rng.integers(0, 3, (heads, units)))
    quota = size * int(rng.integers(0, units + 3))
    want = select_units(score, torch.full((heads, units), size), quota).index
    assert select_uniform_units(score, size, quota).equal(want)


def test_append_buffers_that_share_memory_do_not_see_each_other():
    def put(buffer, value, count):
        buffer = buffer.grow(count)
        buffer.last(count).fill_(value)
        return buffer

    def seen(buffer):
        return buffer.all[1, :, 0].tolist()

    first = put(AppendBuffer.empty_like(torch.zeros(2, 1, 3), torch.float32), 1.0, 2)
    one = put(first, 2.0, 3)
    other = put(first, 3.0, 1)  # the room behind it is taken
    assert one.buffer is first.buffer and other.buffer is not first.buffer
    long = put(one, 4.0, 500)
    assert [seen(each) for each in (first, one, other)] == [[1] * 2, [1] * 2 + [2] * 3, [1] * 2 + [3]]
    assert seen(long) == [1] * 2 + [2] * 3 + [4] * 500 and long.nbytes == long.buffer.nbytes > 505 * 2 * 3 * 4
    with torch.inference_mode():
        again = put(long, 5.0, 200)
    assert seen(put(again, 6.0, 1))[-2:] == [5, 6]  # outside, too


@pytest.mark.core
def test_neighbours_by_hand():
    score = torch.tensor([[0.0, 1.0, 9.0, 2.0, 3.0, 8.0, 4.0, 5.0]])
    two = torch.full((1, 8), 2)
    units = {  # room for the best, then after and before each, then the next best
        (4, 0.0): [2, 5],
        (8, 0.5): [2, 5, 3, 1],
        (12, 0.75): [2, 5, 3, 1, 6, 4],
        (6, 0.7): [2, 3, 1],
        (16, 0.3): [0, 1, 2, 3, 4, 5, 6, 7],
        (10, 0.9): [2, 3, 1, 5, 7],
    }
    for (quota, share), want in units.items():
        got = select_units(score, two, quota, share).index[0]
        assert sorted(set((got // 2).tolist())) == sorted(want), (quota, share)
    assert select_units(score, two, 5, 0.5).index.tolist() == [
        [4, 5, 6, 10, 11]
    ]  # 3 for the best, then one token beside


@pytest.mark.core
@many(60)
def test_neighbours(seed):
    rng = np.random.default_rng(seed)
    heads, units, share = int(rng.integers(1, 4)), int(rng.integers(1, 12)), float(rng.choice([0.1, 0.3, 0.9]))
    total = int(rng.integers(1, 40))
    sizes, score = rng.multinomial(total, np.ones(units) / units, heads), noise(rng, heads, units)
    quota = int(rng.integers(0, total + 5))
    got = select_units(single(score), torch.from_numpy(sizes), quota, share).tolist()
    quota = min(quota, total)
    for h in range(heads):
        ranked, room = sorted(range(units), key=lambda unit: -score[h, unit]), quota - int(share * quota)
        best = [unit for i, unit in enumerate(ranked) if sum(sizes[h, ranked[:i]]) < room]
        order = {}
        for unit in [*best, *(near for b in best for near in (b + 1, b - 1)), *ranked]:
            if 0 <= unit < units:
                order.setdefault(unit, len(order))
        assert got[h] == spent([-order[unit] for unit in range(units)], sizes[h], quota)


@pytest.mark.core
@many(60)
def test_entropy_of_matches(seed):
    rng = np.random.default_rng(seed)
    score = noise(rng, int(rng.integers(1, 50)), scale=float(rng.choice([0.0, 0.1, 1.0, 30.0])))
    assert score_entropy(single(score)[None]) == pytest.approx(r.entropy(score), rel=1e-5, abs=1e-5)


@pytest.mark.core
@many(60)
def test_layers_share_by_density(seed):
    rng = np.random.default_rng(seed)
    layers, steps, unit = int(rng.integers(1, 9)), int(rng.integers(1, 6)), int(rng.choice([1, 8, 32]))
    total = unit * layers * int(rng.integers(0, 50)) + int(rng.integers(0, 2)) * int(rng.integers(0, unit))
    densities = [(rng.random(layers) * 5).tolist() for _ in range(steps)]
    first = (rng.random(layers) * 5).tolist()
    if seed % 3 == 0:  # equal densities share equally, whatever their rounding; and so does no density at all
        densities, first = [[[2.3, 0.0][seed % 2]] * layers] * steps, [[2.3, 0.0][seed % 2]] * layers
    for step, want in enumerate(reading.density_shares(densities, first, total, unit)):
        means = first if step == 0 else np.mean(densities[:step], 0).tolist()
        left, got = total, []
        for layer, now in enumerate(densities[step]):
            got.append(density_share(now, means[layer + 1 :], left, unit))
            left -= got[-1]
        assert got == want and left >= 0 and all(share % unit == 0 and share >= 0 for share in got)


# ---------------------------------------------------------------- the whole decision, on tensors

SPECS = ["infllm", "actqkv", "quest", "clusterkv", "tokenselect", "squeezed", "protokv+recall"]


@pytest.mark.core
@pytest.mark.parametrize("spec", SPECS)
@many(8)
def test_what_is_kept(spec, seed):
    rng = np.random.default_rng(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    budget = int(rng.choice([16, 37, 64, 100]))
    n = budget + int(rng.choice([1, 2, 30, 200]))
    q, k, v = (single(noise(rng, h, n, 8)) for h in (heads, kv_heads, kv_heads))
    kept = kvkeep.select(spec, q, k, v, budget)
    retrieval = parse(spec).retrieval
    sizes, unit = retrieval.sizes(budget), retrieval.chunking.uniform_size(budget)
    always = {*range(sizes.sinks), *range(n - 1 - sizes.near, n)}
    for row in kept.tolist():
        assert row == sorted(set(row)) and row[0] >= 0 and row[-1] == n - 1
        assert always <= set(row) and len(row) <= budget
        assert spec == "squeezed" or len(row) > budget - unit, "less is kept than whole units would allow"
    assert kept.tolist() == kvkeep.select(spec, q, k, v, budget).tolist()
    everything = [list(range(n))] * kv_heads
    assert all(kvkeep.select(spec, q, k, v, room).tolist() == everything for room in (n, n + 1))


def decided(spec, seed, budget=32, **options):
    """A random layer: its queries and keys, what `select` keeps, which keys are far [begin, end), sizes and cut."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    n = int(rng.integers(60, 90))
    q, k, v = (noise(rng, h, n, 8) for h in (heads, kv_heads, kv_heads))
    kept = kvkeep.select(spec, *(single(x) for x in (q, k, v)), budget, **options).tolist()
    retrieval = parse(spec, **options).retrieval
    sizes = retrieval.sizes(budget)
    end = sizes.sinks + (n - 1 - sizes.sinks - sizes.near) // sizes.unit * sizes.unit
    return q, k, kept, sizes.sinks, end, sizes, retrieval.chunking


def represented(spec, q, k, begin, end, sizes, per_head):
    """[chunks]: what they are worth to the last query, by two representatives each."""
    n, chances = k.shape[1], attention(q, k)
    mass = np.array([[sum(row[j + 1 : j + sizes.near + 1, j]) for j in range(n)] for row in chances])
    chunks = [range(first, first + sizes.unit) for first in range(begin, end, sizes.unit)]
    speakers = [known.representatives(mass, chunk, 2, per_head) for chunk in chunks]
    return known.unit_scores(r.joined(q[:, -1:], len(k))[0], k, speakers, spec == "actqkv")


@pytest.mark.core
@pytest.mark.parametrize("spec", ["infllm", "actqkv", "quest", "tokenselect"])
@many(24)
def test_units_are_fetched_for_the_last_query(spec, seed):
    per_head = seed >= 12
    options = {"representatives": 2, "per_head": per_head} if spec in ("infllm", "actqkv") else {}
    q, k, kept, begin, end, sizes, _ = decided(spec, seed, **options)
    if spec == "quest":
        scores = r.quest_scores(q[:, -1], k[:, begin:end], sizes.unit)
    elif spec == "tokenselect":
        scores = [r.tokenselect_votes(q[:, -1:], k[:, begin:end], None)] * len(k)
    else:
        scores = [represented(spec, q, k, begin, end, sizes, per_head)] * len(k)
    n = k.shape[1]
    room = (32 - begin - (n - end)) // sizes.unit
    for row, score in zip(kept, scores, strict=True):
        firsts = [begin + unit * sizes.unit for unit in r.best_chunks(score, room)]
        fetched = [j for first in firsts for j in range(first, first + sizes.unit)]
        assert row == [*range(begin), *fetched, *range(end, n)]


@pytest.mark.core
@many(12)
def test_clusters_are_fetched_for_the_last_query(seed):
    q, k, kept, begin, end, _, chunking = decided("clusterkv", seed, tokens=4)
    n, member = k.shape[1], chunking.members(single(k[:, begin:end]), None, 32).numpy()
    for h, row in enumerate(kept):
        clusters = [begin + tokens for tokens in tokens_of(member[h])]
        query = r.mean_vector(q[:, -1].reshape(len(k), -1, 8)[h])
        centres = [r.mean_vector(k[h, tokens]) if len(tokens) else np.zeros(8) for tokens in clusters]
        fetched = r.tokens_until(
            r.sentence_scores(query, centres), [c.tolist() for c in clusters], 32 - begin - n + end
        )
        assert row == [*range(begin), *fetched, *range(end, n)]


# ---------------------------------------------------------------- the store


def fill(rng, host_budget, blocks=None, heads=None):
    """A store of random slabs, and all that is in it as two plain tensors."""
    heads, (dim, value_dim) = heads or int(rng.integers(1, 4)), rng.integers(1, 5, 2).tolist()
    host, pairs = HostStore(host_budget, CPU), []
    for _ in range(blocks or int(rng.integers(1, 7))):
        n = int(rng.integers(1, 8))
        pairs.append((single(noise(rng, heads, n, dim)), single(noise(rng, heads, n, value_dim))))
        host = host.put(*pairs[-1])
    return host, tuple(torch.cat(part, 1) for part in zip(*pairs, strict=True))


def some(rng, rows, n, count):
    """Ascending token numbers [rows, count]"""
    return torch.tensor(np.sort([rng.choice(n, count, replace=False) for _ in range(rows)]))


def same(pair, whole, index):
    index = index.expand(len(whole[0]), -1)
    return all(
        got.equal(torch.stack([part[h, row] for h, row in enumerate(index)]))
        for got, part in zip(pair, whole, strict=True)
    )


@pytest.mark.core
@many(60)
def test_fetching_is_indexing(seed):
    rng = np.random.default_rng(seed)
    host, whole = fill(rng, HostMemoryBudget())
    heads, n = whole[0].shape[:2]
    assert host.tokens == n and host.nbytes == host.host_budget.used_bytes == sum(t.nbytes for t in whole)
    assert all(a.equal(b) for a, b in zip(host.gather_all(), whole, strict=True))
    for count in {1, n, int(rng.integers(1, n + 1))}:
        for rows in (1, heads):
            index = some(rng, rows, n, count)
            assert same(host.gather(index), whole, index)


@pytest.mark.core
@many(50)
def test_a_store_is_never_changed(seed):
    rng = np.random.default_rng(seed)
    host, whole = fill(rng, HostMemoryBudget())
    keys, values = (t[:, :1].clone() for t in whole)
    before, more = host.gather_all(), host.put(keys, values)
    other = host.put(values.new_zeros(keys.shape), values)
    keys.fill_(9.0)
    for fetched in (host.gather(torch.arange(host.tokens)[None]), more.gather_all()):
        fetched[0].fill_(7.0)
    assert all(a.equal(b) and a.equal(c) for a, b, c in zip(host.gather_all(), before, whole, strict=True))
    assert host.tokens + 1 == more.tokens == other.tokens
    last = torch.tensor([[host.tokens]])
    assert more.gather(last)[0].equal(whole[0][:, :1]) and not other.gather(last)[0].any()
    assert all(a is b and a is c for a, b, c in zip(host.blocks, more.blocks, other.blocks, strict=False))


@pytest.mark.core
@pytest.mark.parametrize(
    "blocks",
    [1, 3],
)
@pytest.mark.parametrize("rows", [1, 2])
def test_fetching_nothing(blocks, rows):
    host, whole = fill(np.random.default_rng(0), HostMemoryBudget(), blocks, heads=2)
    got = host.gather(torch.empty(rows, 0, dtype=torch.long))
    assert [t.shape for t in got] == [(2, 0, part.shape[-1]) for part in whole]


@pytest.mark.core
@many(50)
def test_runs(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    numbers = some(rng, 1, n, int(rng.integers(0, n + 1)))[0].tolist()
    found = runs(numbers)
    assert [i for first, last in found for i in range(first, last)] == numbers
    assert all(a[1] < b[0] for a, b in zip(found, found[1:], strict=False))
    assert runs([3, 4, 5, 9]) == [(3, 6), (9, 10)] and runs([]) == []


@pytest.mark.core
@many(20)
def test_an_arena_hands_out_each_byte_once(seed):
    rng, arena, held = np.random.default_rng(seed), Arena(CPU), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "SMALLEST", 1024)
        patch.setattr(pinned, "LARGEST", 4096)
        for number in range(40):
            kind = [torch.float32, torch.bfloat16, torch.float64][number % 3]
            with torch.inference_mode(bool(number % 2)):  # a block outlives the pass that asked for it
                room = arena.allocate(tuple(rng.integers(1, 9, 3).tolist()), kind)
                held.append((room.copy_(torch.full_like(room, number)), number))
    assert all((room == number).all() and room.is_contiguous() for room, number in held)
    blocks = {room.untyped_storage().data_ptr(): room.untyped_storage().nbytes() for room, _ in held}
    assert arena.allocated == sum(blocks.values()) and all(1024 <= size <= 4096 for size in blocks.values())
    assert (
        sum(room.nbytes for room, _ in held) <= arena.allocated < 2 * len(held) * 512 + sum(r.nbytes for r, _ in held)
    )


class Driver:
    """CUDA's, as far as pinning goes."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, refuses: bool = False):
        self.refuses, self.pinned, self.waits = refuses, {}, 0

    def cudaHostRegister(self, address, size, _):
        assert address % pinned.PAGE == 0
        self.pinned |= {} if self.refuses else {address: size}
        return int(self.refuses)

    def cudaHostUnregister(self, address):
        assert self.waits == 1  # for what the GPU still does with it
        del self.pinned[address]


@pytest.mark.core
def test_pinned_memory_is_pinned_as_long_as_somebody_holds_a_part_of_it(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: setattr(driver, "waits", driver.waits + 1))
    block = pinned._allocate_pinned(2**20, torch.device("cuda"))
    part = block.view(torch.float32).narrow(0, 512, 8).fill_(3)
    assert driver.pinned == {block.data_ptr(): 2**20} and len(block) == 2**20 and not block[:: pinned.PAGE].any()
    del block
    assert driver.pinned and (part == 3).all()
    del part
    assert not driver.pinned and driver.waits == 1


@pytest.mark.core
def test_where_the_driver_will_not_pin_what_is_there_torch_is_asked(monkeypatch):
    asked, empty = [], torch.empty
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(refuses=True))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: asked.append(pin_memory) or empty(size))
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=RuntimeError("told of the refusal")))
    assert len(pinned._allocate_pinned(4096, torch.device("cuda"))) == 4096 and asked == [True]


@pytest.mark.core
@many(50)
def test_a_full_host_budget_loses_nothing(seed):
    rng = np.random.default_rng(seed)
    host, whole = fill(rng, HostMemoryBudget())
    size, n = host.nbytes, host.tokens
    host.host_budget.limit = size + int(rng.integers(0, 4))  # less than one number more
    more = [t[:, :1] for t in whole]
    with pytest.raises(StoreFull, match=r"limit is .*raise host_limit, or give disk="):
        host.put(*more)
    index = some(rng, len(whole[0]), n, int(rng.integers(1, n + 1)))
    assert same(host.gather(index), whole, index) and host.host_budget.used_bytes == size and host.tokens == n
    host.host_budget.limit = None
    assert host.put(*more).tokens == n + 1


@pytest.mark.core
def test_positions_of_a_layer_state():
    near, host = (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)), HostStore(HostMemoryBudget(), CPU)
    assert LayerState(near, host, seen=3).positions() == [[0, 1, 2]] * 2
    pair, where = (torch.zeros(2, 2, 4),) * 2, (torch.tensor([[4, 2], [3, 2]]), torch.tensor([[3, 5], [4, 5]]))
    state = LayerState(near, host, seen=9, sinks=pair, offloaded_positions=where)
    assert state.positions() == [[0, 1, 6, 7, 8]] * 2 and state.device_tokens == 5
    state = LayerState(
        near,
        host,
        9,
        sinks=pair,
        offloaded_positions=where,
        retrieved=Retrieved(None, torch.tensor([[0, 2], [0, 3]]), pair),
    )
    assert state.positions() == [[0, 1, 3, 4, 6, 7, 8], [0, 1, 3, 5, 6, 7, 8]]
    assert state.device_tokens == 7 and state.nbytes == 2 * 2 * 7 * 4 * 4 and state.near_start == 6
    one = LayerState(
        near,
        host,
        9,
        offloaded_positions=(torch.tensor([[4, 2]]),),
        retrieved=Retrieved(None, torch.tensor([[0, 1]]), pair),
    )
    assert one.positions() == [[2, 4, 6, 7, 8]] * 2  # one choice for all heads


# ---------------------------------------------------------------- the store on disk


@pytest.fixture
def spill(tmp_path):
    opened = DiskStore(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("limit", [0, 100, 400])
@pytest.mark.parametrize("seed", range(17))
def test_what_is_spilled_comes_back(spill, limit, seed):
    rng = np.random.default_rng(seed)
    host, whole = fill(rng, HostMemoryBudget(limit, spill))
    heads, n = whole[0].shape[:2]
    assert host.host_budget.used_bytes <= limit and host.nbytes == sum(t.nbytes for t in whole)
    files = [path for path in spill.folder.iterdir() if path.suffix == ".safetensors"]
    assert (host.host_budget.used_bytes < host.nbytes) == bool(files) and (limit or len(files) == len(host.blocks))
    for rows in (1, heads):
        index = some(rng, rows, n, int(rng.integers(1, n + 1)))
        assert same(host.gather(index), whole, index)
    assert all(a.equal(b) for a, b in zip(host.gather_all(), whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_spilling_keeps_every_bit(spill, dtype):
    wide = torch.randn(2, 5, 9).to(dtype)
    host = HostStore(HostMemoryBudget(0, spill), CPU).put(wide[..., :4].transpose(0, 1), wide[..., 4:].transpose(0, 1))
    assert all(a.equal(b.transpose(0, 1)) for a, b in zip(host.gather_all(), wide.split([4, 5], -1), strict=True))


def test_the_folder_goes_with_the_store(tmp_path):
    first, second = DiskStore(tmp_path), DiskStore(tmp_path)
    assert first.folder != second.folder and first.folder.is_dir()  # one that is alive is not swept
    fill(np.random.default_rng(0), HostMemoryBudget(0, first))
    first.close()
    first.close()
    assert list(tmp_path.iterdir()) == [second.folder]
    del second
    assert list(tmp_path.iterdir()) == []


STAYS = """
import sys, time, torch
from kvkeep.storage.offload.disk import DiskStore
spill = DiskStore(sys.argv[1])
spill.write(torch.ones(1, 2, 3), torch.ones(1, 2, 3))
print(spill.folder, flush=True)
time.sleep(60)
"""


def test_leftovers_of_a_dead_process_are_swept(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", STAYS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        folder = tmp_path / other.stdout.readline().strip()
        DiskStore(tmp_path).close()
        assert sorted(path.name for path in folder.iterdir()) == ["0.safetensors", "alive"]
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()
    assert folder.is_dir()
    mine = DiskStore(tmp_path)
    assert list(tmp_path.iterdir()) == [mine.folder]
    mine.close()


def test_a_full_disk_loses_nothing(spill, monkeypatch):
    rng = np.random.default_rng(0)
    host, whole = fill(rng, HostMemoryBudget(100, spill))
    files, size = sorted(spill.folder.iterdir()), host.host_budget.used_bytes

    def full(tensors, path):
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(spilling, "save_file", full)
        with pytest.raises(StoreFull, match=r"No space left.*Nothing was lost"):
            host.put(*whole)
    index = some(rng, len(whole[0]), host.tokens, host.tokens // 2)
    assert same(host.gather(index), whole, index)
    assert sorted(spill.folder.iterdir()) == files and host.host_budget.used_bytes == size
    assert host.put(*whole).tokens == 2 * host.tokens


def test_a_folder_that_cannot_be(tmp_path):
    with pytest.raises(BadParameter, match="is not a folder; make it first"):
        DiskStore(tmp_path / "nowhere")
    (tmp_path / "kvkeep-notes.txt").write_text("a file, not a folder")
    DiskStore(tmp_path).close()
    assert (tmp_path / "kvkeep-notes.txt").exists()


def test_folders_of_others_are_left_alone(tmp_path):
    notes = tmp_path / "kvkeep-experiments" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("not ours")
    DiskStore(tmp_path).close()
    assert notes.exists()


def test_folders_that_may_not_be_opened_are_left_alone(tmp_path, monkeypatch):
    (tmp_path / "kvkeep-of-another").mkdir()
    usual = os.open

    def guarded(path, *args, **options):
        if "of-another" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return usual(path, *args, **options)

    monkeypatch.setattr(spilling.os, "open", guarded)
    DiskStore(tmp_path).close()
    assert (tmp_path / "kvkeep-of-another").exists()
