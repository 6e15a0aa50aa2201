"""Every method against a plain-loop float64 transcription of its specification, written without sight of the code."""

from functools import partial

import numpy as np
import pytest
import torch
from oracles.ahakv import oracle_ahakv, scores_ahakv
from oracles.allocation import adakv, kept_by_quota, pyramid
from oracles.cake import oracle_cake, preference_cake, scores_cake
from oracles.full import oracle_full, oracle_lm_infinite, oracle_streamingllm
from oracles.h2o import oracle_h2o, scores_h2o
from oracles.intelllm import oracle_intelllm, placement_intelllm, scores_intelllm
from oracles.intentkv import oracle_intentkv, scores_intentkv
from oracles.layers import allocate, density_entropy
from oracles.nacl import gumbel, oracle_nacl, scores_nacl
from oracles.protokv import (
    cluster_worth,
    clusters_of,
    lsh_size,
    oracle_protokv,
    oracle_satkv,
    parts_protokv,
    scores_protokv,
    scores_satkv,
)
from oracles.snapkv import oracle_chunkkv, oracle_snapkv, scores_chunkkv, scores_snapkv
from oracles.tova import oracle_tova, scores_tova

import kvkeep
from kvkeep.compress.attention import uniform
from kvkeep.compress.budget.heads import AdaptiveHeads
from kvkeep.compress.budget.layers import CakeLayers, EntropyLayers, Pyramid
from kvkeep.compress.parse import parse
from kvkeep.compress.positions import Capped, Contiguous, Gap, PlacementInput
from kvkeep.compress.scorers.window import ProtoKVScorer
from kvkeep.kernels.torch.ranking import Units
from kvkeep.types import PAD_POSITION, Observation

HEADS = [(4, 4), (4, 2), (6, 2), (4, 1), (8, 2)]
LENGTHS = [1, 2, 3, 7, 17, 31, 63, 64, 65, 100, 129, 257, 700]


def draw(seed: int):
    """Queries, keys and values of a random shape, some with duplicated keys; and a budget, often near an edge."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    n, dim = LENGTHS[seed % len(LENGTHS)], int(rng.choice([8, 16, 33]))
    q, k, v = (rng.standard_normal((h, n, dim)) * s for h, s in ((heads, 2.0), (kv_heads, 1.0), (kv_heads, 1.0)))
    if seed % 4 == 0:  # ties: later tokens repeat earlier keys
        half = n // 2
        k[:, half : 2 * half] = k[:, :half]
    budget = int(rng.choice([1, 2, max(1, n // 8), max(1, n // 3), max(1, n - 1), n, n + 1, 10]))
    return q, k, v, budget


def ours(spec, q, k, v, budget, **parameters):
    return kvkeep.select(spec, *(torch.from_numpy(x) for x in (q, k, v)), budget, **parameters).tolist()


def assert_same(kept, expected, scored, *given, **options):
    """Equal sets; where float32 cannot tell two scores apart, equal scores at the border.

    scored: the oracle's scores of what is given. They take as long as its choice, and are asked for where they matter.
    """
    assert [len(head) for head in kept] == [len(head) for head in expected]
    assert all(mine == sorted(set(mine)) for mine in kept)
    odd = {head: set(mine) ^ set(theirs) for head, (mine, theirs) in enumerate(zip(kept, expected, strict=True))}
    scores = scored(*given, **options) if any(odd.values()) else None
    for head in (head for head in odd if odd[head]):
        worst = min(scores[head][j] for j in expected[head])
        near = (abs(scores[head][j] - worst) <= 2e-6 * max(1e-3, abs(worst)) for j in odd[head])
        assert all(near), (head, sorted(odd[head]))


@pytest.mark.parametrize("seed", range(60))
def test_snapkv(seed):
    q, k, v, budget = draw(seed)
    window, pool, kind = [(64, 5, "avg"), (32, 7, "max"), (8, 3, "avg"), (5, 1, "avg")][seed % 4]
    options = {"window": window, "pool": pool, "kind": kind}
    expected = oracle_snapkv(q, k, v, budget, **options)
    kept = ours("snapkv", q, k, v, budget, window=window, pool=pool, pooling=kind)
    assert_same(kept, expected, scores_snapkv, q, k, v, budget, **options)


@pytest.mark.parametrize("seed", range(60))
def test_tova(seed):
    q, k, v, budget = draw(seed)
    assert_same(ours("tova", q, k, v, budget), oracle_tova(q, k, v, budget), scores_tova, q, k, v, budget)


@pytest.mark.parametrize("variant", [{}, {"boundary": "subsequent"}], ids=["paper", "subsequent"])
@pytest.mark.parametrize("seed", range(60))
def test_intentkv(seed, variant):
    q, k, v, budget = draw(seed)
    options = [
        {},
        {"block": 1},
        {"intention": False},
        {"block": 5, "window": 20, "smooth": 3},
        {"recent": 3, "sinks": 2},
    ][seed % 5] | variant
    forced = options.get("recent", 0) + options.get("sinks", 0)
    budget = max(budget, forced)
    expected = oracle_intentkv(q, k, v, budget, **options)
    kept = ours("intentkv", q, k, v, budget, **options)
    if kept != expected:  # a float32 tie between blocks: the same number of tokens, of equally good blocks
        scores = scores_intentkv(q, k, v, budget, **options)
        for mine, theirs, score in zip(kept, expected, scores, strict=True):
            worth = [sum(score[j] for j in side if np.isfinite(score[j])) for side in (mine, theirs)]
            assert len(mine) == len(theirs) and worth[0] == pytest.approx(worth[1], rel=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_full_and_streaming(seed):
    q, k, v, budget = draw(seed)
    assert ours("full", q, k, v, budget) == oracle_full(q, k, v, budget)
    assert ours("lm_infinite", q, k, v, budget + 10) == oracle_lm_infinite(q, k, v, budget + 10)
    budget += 4
    assert ours("streamingllm", q, k, v, budget) == oracle_streamingllm(q, k, v, budget)


@pytest.mark.parametrize("seed", range(60))
def test_pyramid_budgets(seed):
    rng = np.random.default_rng(seed)
    tokens, layers = int(rng.integers(1, 700)), int(rng.integers(1, 40))
    budget = int(rng.integers(1, tokens + 3))
    floor = int(rng.integers(0, budget // 2 + 1))
    shares = (
        Pyramid(int(rng.integers(1, 30)))(budget, floor, tokens, layers)
        if seed % 2
        else Pyramid()(budget, floor, tokens, layers)
    )
    assert sum(shares) == layers * min(budget, tokens)
    assert all(min(floor, tokens) <= share <= tokens for share in shares)
    if not seed % 2:
        assert shares == pyramid(budget, layers, tokens, floor)


@pytest.mark.parametrize("seed", range(60))
def test_adakv_quotas(seed):
    rng = np.random.default_rng(seed)
    heads, n = int(rng.integers(1, 6)), int(rng.integers(1, 200))
    budget, alpha = int(rng.integers(1, n + 1)), float(rng.choice([0.0, 0.2, 0.5, 1.0]))
    scores = (
        rng.integers(0, 5, (heads, n)).astype(float) if seed % 3 == 0 else rng.random((heads, n)).astype(np.float32)
    )
    forced = np.zeros((heads, n), dtype=bool)
    forced[:, n - budget // 3 :] = budget // 3 > 0
    quota = AdaptiveHeads(alpha)(torch.from_numpy(np.asarray(scores)), torch.from_numpy(forced), [n] * heads, budget)
    assert quota == adakv(scores, [set(np.flatnonzero(row)) for row in forced], budget, alpha)
    assert sum(quota) == heads * budget


@pytest.mark.parametrize("seed", range(50))
def test_snapkv_with_adakv(seed):
    q, k, v, budget = draw(seed)
    budget = min(budget, max(1, k.shape[1] - 1))
    scores = scores_snapkv(q, k, v, budget)
    forced = [set(np.flatnonzero(np.isinf(row))) for row in scores]
    kept, expected = (
        ours("snapkv+adakv", q, k, v, budget),
        kept_by_quota(scores, forced, adakv(scores, forced, budget, 0.2)),
    )
    if [len(head) for head in kept] == [len(head) for head in expected]:
        return assert_same(kept, expected, lambda: scores)
    # a float32 tie between heads: as many tokens in all, worth as much
    worth = [sum(min(scores[h][j], 1.0) for h, head in enumerate(side) for j in head) for side in (kept, expected)]
    assert sum(map(len, kept)) == sum(map(len, expected)) and worth[0] == pytest.approx(worth[1], rel=1e-6)


def worth_the_same(kept, expected, scores):
    """A float32 tie between units: as many tokens, of the same total score."""
    for mine, theirs, score in zip(kept, expected, scores, strict=True):
        worth = [sum(score[j] for j in side if np.isfinite(score[j])) for side in (mine, theirs)]
        assert len(mine) == len(theirs) and worth[0] == pytest.approx(worth[1], rel=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_h2o(seed):
    q, k, v, budget = draw(seed)
    assert_same(ours("h2o", q, k, v, budget), oracle_h2o(q, k, v, budget), scores_h2o, q, k, v, budget)


@pytest.mark.parametrize("more", [{}, {"gain": "multiply"}, {"recent_only": False}], ids=str)
@pytest.mark.parametrize("seed", range(60))
def test_ahakv(seed, more):
    q, k, v, budget = draw(seed)
    options = [{}, {"step_gain": False}, {"value_prior": False}, {"recent": 7, "pool": 3, "value_pool": 1}][seed % 4]
    options |= more
    expected = oracle_ahakv(q, k, v, budget, **options)
    for prior in ({},) if more else ({}, {"decode_prior": True}):  # of no matter yet
        kept = ours("ahakv", q, k, v, budget, **options, **prior)
        assert_same(kept, expected, scores_ahakv, q, k, v, budget, **options)


@pytest.mark.parametrize("seed", range(60))
def test_intelllm(seed):
    q, k, v, budget = draw(seed)
    options = [{}, {"mode": "local"}, {"keep_head": False}, {"near": 5, "head_gravity": 3, "window": 10}][seed % 4]
    kept, expected = (f(q, k, v, budget, **options) for f in (partial(ours, "intelllm"), oracle_intelllm))
    assert_same(kept, expected, scores_intelllm, q, k, v, budget, **options)


@pytest.mark.parametrize("seed", range(60))
def test_cake(seed):
    q, k, v, budget = draw(seed)
    options = [{}, {"gamma": 5.0, "window": 9}, {"pool": 1}][seed % 3]
    kept, expected = (f(q, k, v, budget, **options) for f in (partial(ours, "cake"), oracle_cake))
    assert_same(kept, expected, scores_cake, q, k, v, budget, **options)


def test_luck_is_even_and_the_same_everywhere():
    for seed in (0, 7, 3 * 1_000_003, 2**40 + 1):
        got = uniform(seed, torch.arange(20000))
        for i in (0, 1, 12345):
            bits = i
            for part in (seed & 0xFFFFFFFF, seed >> 32):
                bits = (bits + part * 0x9E3779B9) % 2**32
                bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32
                bits = (bits ^ bits >> 15) * 0x846CA68B % 2**32
                bits ^= bits >> 16
            assert got[i] == (bits + 0.5) / 2**32
        assert torch.histc(got, 10, 0, 1).sub(2000).abs().max() < 200  # five standard deviations
        assert torch.corrcoef(torch.stack([got[1:], got[:-1]]))[0, 1].abs() < 0.04
        other = uniform(seed + 1, torch.arange(20000))
        assert torch.corrcoef(torch.stack([got, other]))[0, 1].abs() < 0.04


@pytest.mark.parametrize("seed", range(60))
def test_nacl(seed):
    q, k, v, budget = draw(seed)
    options = [{}, {"random": 0.3, "window": 9}, {"random": 0.0}, {"random": 1.0}][seed % 4]
    noise = gumbel(uniform(seed, torch.arange(k[..., 0].size)).view(k.shape[:2]).numpy())
    expected = oracle_nacl(q, k, v, budget, noise=noise, **options)
    kept = ours("nacl", q, k, v, budget, seed=seed, **options)
    if kept != expected:
        assert [len(head) for head in kept] == [len(head) for head in expected]
        scores = scores_nacl(q, k, v, budget, **options)
        for head, (mine, theirs) in enumerate(zip(kept, expected, strict=True)):
            keys = (
                sorted(scores[head][j] for j in set(mine) - set(theirs)),
                sorted(scores[head][j] for j in set(theirs) - set(mine)),
            )
            assert np.allclose(*keys, rtol=1e-5), (seed, head)


@pytest.mark.parametrize("seed", range(60))
def test_chunkkv(seed):
    q, k, v, budget = draw(seed)
    options = [{}, {"chunk": 4, "window": 9}][seed % 2]
    expected = oracle_chunkkv(q, k, v, budget, **{"window": 32, **options})
    kept = ours("chunkkv", q, k, v, budget, **options)
    if kept != expected:
        worth_the_same(kept, expected, scores_chunkkv(q, k, v, budget, **{"window": 32, **options}))


@pytest.mark.parametrize("seed", range(80))
def test_adakv_quotas_over_units(seed):
    """Blocks with many ties, and scattered clusters worth something of their own."""
    rng = np.random.default_rng(seed)
    heads, n = int(rng.integers(1, 6)), int(rng.integers(2, 150))
    budget, alpha = int(rng.integers(1, n)), float(rng.choice([0.0, 0.2, 0.5, 1.0]))
    forced = np.zeros((heads, n), dtype=bool)
    forced[:, n - budget // 3 :] = budget // 3 > 0
    if seed % 2:
        scores = rng.integers(0, 4, (heads, n)).astype(float)
        units = np.tile(np.arange(n) // int(rng.integers(1, 9)), (heads, 1))
        worth = np.array([np.bincount(u, s) for u, s in zip(units, scores * ~forced, strict=True)])
    else:
        scores, count = rng.standard_normal((heads, n)), int(rng.integers(1, n + 1))
        units, worth = rng.integers(0, count, (heads, n)), rng.standard_normal((heads, count))
    stay = [set(np.flatnonzero(row)) for row in forced]
    expected = adakv(scores, stay, budget, alpha, units.tolist(), worth.tolist())
    scores, forced, units, worth = (torch.from_numpy(x) for x in (scores, forced, units, worth))
    assert AdaptiveHeads(alpha)(scores, forced, [n] * heads, budget, Units(units, worth)) == expected


@pytest.mark.parametrize("seed", range(60))
def test_adakv_over_blocks_and_clusters(seed):
    """The whole way: votes, units, quotas, and what each head keeps is a prefix of its own order."""
    q, k, v, budget = draw(seed)
    budget, n = min(budget, max(1, k.shape[1] - 1)), k.shape[1]
    if seed % 2:
        spec, block, scores = (
            "snapkv:window=8:pool=1+blocks:block=6+adakv",
            6,
            scores_snapkv(q, k, v, budget, window=8, pool=1),
        )
        forced = [set(np.flatnonzero(np.isinf(row))) for row in scores]
        units = [[j // block for j in range(n)]] * len(k)
        worth = [
            {u: sum(row[j] for j in range(n) if j // block == u and j not in stay) for u in range(n)}
            for row, stay in zip(scores, forced, strict=True)
        ]
    else:
        spec, options = "protokv:votes=softmax:seed=7+adakv", {"votes": "softmax"}
        ranks, scores, units = parts_protokv(q, k, budget, **hashing(k.shape[2], n, {}), **options)
        forced = [set(np.flatnonzero(np.isinf(row))) for row in ranks]
        worth = [dict(zip(own, cluster_worth(s, own), strict=True)) for s, own in zip(scores, units, strict=True)]
    quota = adakv(scores, forced, budget, 0.2, units, worth)
    kept, expected = ours(spec, q, k, v, budget), kept_by_quota(scores, forced, quota, units, worth)
    assert sum(map(len, kept)) == min(budget, n) * len(k)
    if kept != expected:  # float32 may see a tie where there is none: then what differs is worth the same
        odd = [(h, j) for h in range(len(k)) for j in set(kept[h]) ^ set(expected[h])]
        values = [worth[h][units[h][j]] for h, j in odd]
        assert max(values) == pytest.approx(min(values), rel=1e-5), (seed, odd)


PROTOTYPES = [
    {},
    {"votes": "softmax"},
    {"prototypes": "chunks", "chunks": 20},
    {"prototypes": "lsh", "bits": 3},
    {"chunks": 30, "anchors": 6, "kappa": 2, "window": 4},
    {"worth": "sum", "votes": "softmax"},
    {"worth": "sum", "votes": "raw", "buckets": 3},
    {"buckets": 5, "bits": 3, "anchors": 50, "votes": "softmax"},
    {"prototypes": "lsh", "votes": "softmax", "chunks": 9, "buckets": 2},
    {"chunks": 500, "votes": "raw"},
    {"prototypes": "chunks", "votes": "raw", "worth": "sum", "anchors": 1},
]


def hashing(dim: int, n: int, options: dict) -> dict:
    """The random features of seed 7, as many as there are bits."""
    source = torch.Generator().manual_seed(7)
    bits = options.get("bits", 2)
    if options.get("prototypes") == "lsh":
        bits = lsh_size(n, bits, options.get("buckets"), options.get("chunks"))[1]
    weights = torch.randn(bits, dim, generator=source) * dim**-0.5
    phase = torch.rand(bits, generator=source) * 2 * torch.pi
    return {"W": weights.double().numpy(), "b": phase.double().numpy()}


@pytest.mark.parametrize("seed", range(110))
def test_protokv(seed):
    q, k, v, budget = draw(seed)
    options = {"votes": ProtoKVScorer.votes, **PROTOTYPES[seed % len(PROTOTYPES)]}
    chance = hashing(k.shape[2], k.shape[1], options)
    expected = oracle_protokv(q, k, v, budget, **chance, **options)
    kept = ours("protokv", q, k, v, budget, seed=7, **options)
    if kept != expected:
        assert_same(kept, expected, scores_protokv, q, k, v, budget, **chance, **options)


@pytest.mark.parametrize("seed", range(77))
def test_clusters_of_protokv(seed):
    """Every token's cluster has the oracle's number, with heads of equal and of different lengths."""
    _, k, _, _ = draw(seed)
    options = {name: x for name, x in PROTOTYPES[seed % len(PROTOTYPES)].items() if name not in ("votes", "window")}
    group = parse("protokv", seed=7, **options).group
    n = k.shape[1]
    lengths = [max(1, n - 5 * head) for head in range(len(k))] if seed % 2 else [n] * len(k)
    member = group.members(observed(k, lengths))
    for head, length in enumerate(lengths):
        chance = hashing(k.shape[2], length, options)
        settings = {name: x for name, x in options.items() if name != "worth"}
        assert member[head, :length].tolist() == clusters_of(k[head, :length], **chance, **settings)
        assert int(member[head].max()) < group.num_clusters(observed(k, lengths))


def observed(keys, lengths) -> Observation:
    """Heads that hold so many of these keys, and no queries."""
    keys, n = torch.from_numpy(keys), keys.shape[1]
    here = torch.arange(n).expand(len(keys), -1)
    here = torch.where(here < torch.tensor(lengths)[:, None], here, PAD_POSITION)
    return Observation(keys[:, :0], keys, keys, here, tuple(lengths), n, n, 1.0)


@pytest.mark.parametrize("seed", range(60))
def test_satkv(seed):
    q, k, v, budget = draw(seed)
    options = [{}, {"kappa": 2, "window": 3}][seed % 2]
    kept, expected = (f(q, k, v, budget, **options) for f in (partial(ours, "satkv"), oracle_satkv))
    assert_same(kept, expected, scores_satkv, q, k, v, budget, **options)


@pytest.mark.parametrize("seed", range(50))
def test_weights_of_layers(seed):
    q, k, v, budget = draw(seed)
    n = k.shape[1]
    seen = Observation(
        *(torch.from_numpy(x) for x in (q, k, v)),
        torch.arange(n).expand(len(k), -1),
        (n,) * len(k),
        n,
        n,
        k.shape[2] ** -0.5,
    )
    cake, density = preference_cake(q, k, budget)[2], density_entropy(q, k, budget)
    assert float(CakeLayers().layer_weight(seen, budget)) == pytest.approx(cake, rel=1e-4, abs=1e-7)
    assert float(EntropyLayers().layer_weight(seen, budget)) == pytest.approx(density, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("seed", range(60))
def test_shares_by_weight(seed):
    rng = np.random.default_rng(seed)
    weights = [float(w) for w in rng.exponential(size=int(rng.integers(1, 40))) ** int(rng.integers(1, 4))]
    weights = [0.0 if rng.random() < 0.1 * (seed % 3) else w for w in weights]
    tokens = int(rng.integers(1, 700))
    budget = int(rng.integers(1, tokens + 2))
    floor = int(rng.integers(1, budget // 2 + 2)) if budget > 1 else 1
    shares = CakeLayers()(budget, floor, tokens, weights)
    assert shares == allocate(weights, budget, tokens, floor)
    assert sum(shares) == len(weights) * min(budget, tokens)


@pytest.mark.parametrize("seed", range(60))
def test_places(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(31, [60, 400][seed % 2]))
    budget = int(rng.integers(8, 30))
    trained, near = int(rng.integers(60, 500)), int(rng.integers(1, budget))
    kept = sorted({*rng.choice(n - near, budget - near, replace=False).tolist(), *range(n - near, n)})
    where = PlacementInput(torch.tensor(kept), n, budget, trained)
    assert Gap(near)(where).tolist() == placement_intelllm(kept, n, near, trained)
    assert Gap(near, near)(where).tolist() == Contiguous()(where).tolist() == list(range(n - budget, n))
    assert Capped()(where).tolist() == [max(p, n - trained) for p in kept]
