"""The whole decision of a retrieval method, on tensors."""

import numpy as np
import pytest
from draws import HEADS, many, noise, single, tokens_of
from oracles import representatives as known
from oracles import retrieval as r
from oracles.common import attention

import kvkeep
from kvkeep.compress.parse import parse

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
