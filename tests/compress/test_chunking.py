"""Chunks, clusters, events and sentences, against float64 oracles."""

import math

import numpy as np
import pytest
import torch
from draws import close, many, noise, single
from oracles import retrieval as r

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
