"""Methods that need no question, and one budget for all layers, against the oracles of tests/oracles/frontier.py."""

import numpy as np
import pytest
import torch
from draws import many
from oracles import frontier
from test_against_oracles import assert_same, draw, ours

import kvkeep
from kvkeep.compress.attention import gram, uniform
from kvkeep.compress.budget.coverage import Needed, amounts
from kvkeep.compress.budget.heads import (
    AdaptiveHeads,
    Candidates,
    EqualHeads,
    SharedBudget,
    Threshold,
    best_of,
    coverage_of,
)
from kvkeep.compress.guard import Guard
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse
from kvkeep.compress.pipeline import PlacedSelection
from kvkeep.compress.scorers.compactor import CompactorScorer
from kvkeep.compress.scorers.order import POSITIONS
from kvkeep.compress.scorers.repetition import Repetition
from kvkeep.errors import BadParameter
from kvkeep.kernels.dispatch import ranks
from kvkeep.kernels.torch.ranking import inverse, ranked
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.types import Observation, Tokens


@many(60)
def test_random(seed):
    q, k, v, budget = draw(seed)
    heads, n = k.shape[:2]
    table = uniform(seed, torch.arange(n) + POSITIONS * torch.arange(heads)[:, None]).float().numpy()
    given = q, k, v, budget
    kept = ours("random", *given, seed=seed)
    assert_same(kept, frontier.oracle_random(*given, uniform=table), frontier.scores_random, *given, uniform=table)


@pytest.mark.parametrize("name", ["knorm", "keydiff"])
@many(60)
def test_keys_alone(name, seed):
    given = draw(seed)
    expected, scored = (getattr(frontier, f"{kind}_{name}") for kind in ("oracle", "scores"))
    assert_same(ours(name, *given), expected(*given), scored, *given)


@many(60)
def test_lagkv(seed):
    q, k, v, budget = draw(seed)
    options = [{}, {"lag": 16}, {"lag": 5, "sinks": 0}, {"lag": 2, "sinks": 1}, {"lag": 31, "sinks": 7}][seed % 5]
    if seed % 3 == 0:  # a channel that never changes
        k[..., 0] = 1.0
    given = q, k, v, budget
    kept = ours("lagkv", *given, **options)
    expected = frontier.oracle_lagkv(*given, **options)
    if kept != expected:  # two spreads that float32 cannot tell apart swap their ranks
        scores = frontier.scores_lagkv(*given, **options)
        for mine, theirs, row in zip(kept, expected, scores, strict=True):
            gaps = [abs(row[a] - row[b]) for a in set(mine) - set(theirs) for b in set(theirs) - set(mine)]
            assert len(mine) == len(theirs) and all(gap <= 1.01 / options.get("lag", 128) for gap in gaps)


@many(60)
def test_rkv(seed, monkeypatch):
    if seed % 2:
        monkeypatch.setattr("kvkeep.compress.scorers.window.COMPARED", 100)  # a few rows at a time
    given = draw(seed)
    options = [{}, {"importance": 0.9, "alike": 0.9}, {"window": 1, "pool": 1, "importance": 0.0}][seed % 3]
    assert_same(
        ours("rkv", *given, **options), frontier.oracle_rkv(*given, **options), frontier.scores_rkv, *given, **options
    )


def layers_of(seed):
    """Scores of some layers, many of them equal; which tokens are forced, and a budget."""
    rng = np.random.default_rng(seed)
    layers, heads, n = (int(x) for x in (rng.integers(1, 6), rng.integers(1, 5), rng.integers(1, 60)))
    scores = rng.integers(0, 5, (layers, heads, n)) / 4 if seed % 2 else rng.random((layers, heads, n))
    budget, count = int(rng.integers(1, n + 1)), int(rng.integers(0, 3))
    forced = [[list(range(min(count, budget))) for _ in range(heads)] for _ in range(layers)]
    return scores.astype(np.float32), forced, budget, float(rng.choice([0.0, 0.0, 0.3, 1.0]))


def candidates(scores, forced, budget, floor, covers=False):
    """One layer's, as the pipeline makes them."""
    heads, n = scores.shape
    scores, must = torch.from_numpy(scores), torch.zeros(heads, n, dtype=torch.bool)
    for head, tokens in enumerate(forced):
        must[head, tokens] = True
    sure = SharedBudget(floor).sure(must, budget)
    positions = torch.arange(n).expand(heads, -1)
    tokens = Tokens(*(torch.zeros(heads, n, 1) for _ in range(2)), positions)
    whole = amounts(scores, ~must).sum() if covers else None
    return Candidates.of(tokens, scores, ranks(scores, must, None), sure, None, whole)


@pytest.mark.parametrize("at_once", [True, False])
@many(80)
def test_shared(at_once, seed):
    """The same whether all layers are there or the worst tokens leave after every layer."""
    scores, forced, budget, floor = layers_of(seed)
    layers, heads, n = scores.shape
    if n <= budget:
        return
    total, held = layers * heads * budget, []
    for layer in range(layers):
        held.append(candidates(scores[layer], forced[layer], budget, floor))
        if not at_once:
            held = best_of(held, total)
            assert sum(map(len, held)) <= total
    kept = [[head.token_positions.tolist() for head in each.heads()] for each in best_of(held, total)]
    assert kept == frontier.shared(scores, forced, budget, floor)


@pytest.mark.parametrize("at_once", [True, False])
@many(80)
def test_coverage_of_all_layers(at_once, seed):
    """The share is of all scores, though tokens without a chance have left before the last layer."""
    scores, forced, most, _ = layers_of(seed)
    layers, heads, _ = scores.shape
    share, total, held = [0.5, 0.9, 0.99, 1.0][seed % 4], layers * heads * most, []
    for layer in range(layers):
        held.append(candidates(scores[layer], forced[layer], most, 0.0, covers=True))
        if not at_once:
            held = best_of(held, total)
    kept = best_of(held, total, Needed(share))
    expected = frontier.coverage(scores, forced, most, share, "all")
    assert [[head.token_positions.tolist() for head in each.heads()] for each in kept] == expected
    assert coverage_of(kept) == pytest.approx(reached(scores, forced, expected))


def reached(scores, forced, kept):
    """The share of the scores of tokens that are not forced."""
    places = [(layer, head) for layer in range(len(scores)) for head in range(len(scores[layer]))]
    taken = sum(float(scores[a][b][j]) for a, b in places for j in set(kept[a][b]) - set(forced[a][b]))
    whole = sum(float(scores[a][b][j]) for a, b in places for j in range(len(scores[a][b])) if j not in forced[a][b])
    return taken / whole if whole else 1.0


POOLS = {"head": (EqualHeads(), 0.0), "layer": (AdaptiveHeads(0.0), 0.0), "floor": (AdaptiveHeads(0.5), 0.5)}


def test_epsilon_is_the_authors_where_heads_compete():
    epsilon = {"": None, "+adakv": 0.02, "+shared": 0.02, ":epsilon=0.0+adakv": 0.0, ":epsilon=0.01+adakv": 0.01}
    for rest, want in epsilon.items():
        assert parse(f"expected_attention{rest}").scorer.epsilon == want


@pytest.mark.parametrize("pool", POOLS)
@many(80)
def test_coverage_of_one_layer(pool, seed):
    scores, forced, most, _ = layers_of(seed)
    heads, n = scores[0].shape
    table, share = torch.from_numpy(scores[0]), [0.5, 0.9, 0.99, 1.0][seed % 4]
    allocator, alpha = POOLS[pool]
    guard = Guard(len(forced[0][0]))
    method = Method("table", lambda seen, budget: table, guard, heads=allocator, coverage=share)
    found = kvkeep.select(method, *(torch.zeros(heads, n, 2) for _ in range(3)), most)
    expected = frontier.coverage(scores[:1], forced[:1], most, share, "head" if pool == "head" else "layer", alpha)
    assert found.tolist() == expected[0]
    assert found.coverage == pytest.approx(reached(scores[:1], forced[:1], expected))


def even(seed, longest=40):
    """As `draw`, of few tokens, as the oracle's loops are slow, and an even size; and RoPE's frequencies."""
    q, k, v, budget = draw(seed)
    n, dim = min(q.shape[1], longest), q.shape[2] // 2 * 2
    q, k, v = (x[:, :n, :dim].astype(np.float32).astype(np.float64) for x in (q, k, v))
    return (q, k, v, min(budget, n)), np.array([100.0 ** (-2 * i / dim) for i in range(dim // 2)], dtype=np.float32)


def near(kept, expected, scores, rtol=2e-5):
    """Equal sets, but for tokens whose scores float32 cannot tell apart."""
    for mine, theirs, row in zip(kept, expected, scores, strict=True):
        worst = min(row[j] for j in theirs)
        assert len(mine) == len(theirs)
        assert all(abs(row[j] - worst) <= rtol * abs(worst) for j in set(mine) ^ set(theirs))


@many(60)
def test_echo(seed):
    given, frequencies = even(seed)
    cases = [{}, {"chunk": 8}, {"chunk": 5, "sinks": 2, "gap": 3}, {"chunk": 16, "sinks": 0}, {"chunk": 8, "near": 2}]
    options = cases[seed % 5]
    given = *given[:3], max(given[3], options.get("sinks", 4))
    kept = ours("echo", *given, frequencies=torch.from_numpy(frequencies), **options)
    scores = frontier.scores_echo(*given, inv_freq=frequencies, **options)
    near(kept, frontier.keep(scores, given[1], given[3]), scores)


@many(50)
def test_echo_scores(seed):
    """The numbers, not only their order: other layers' are compared with them."""
    (q, k, v, _), frequencies = even(seed, 30)
    cases = [{"chunk": 8}, {"chunk": 5, "sinks": 2, "gap": 3}, {"chunk": 64, "sinks": 0}, {"near": 3}, {"near": 0}]
    options = cases[seed % 5]
    queries, keys, values = (torch.from_numpy(x).float() for x in (q, k, v))
    heads, n, dim = keys.shape
    where = torch.arange(n).expand(heads, -1), (n,) * heads, n, n, dim**-0.5
    rotate = Rotation(torch.from_numpy(frequencies), False).rotate
    seen = Observation(queries, keys, values, *where, token_state=torch.zeros(heads, n, 1), rotate=rotate)
    got = Repetition(**options)(seen, 1)[..., 0]
    want = frontier.scores_echo(q, k, v, 1, inv_freq=frequencies, **{**options, "sinks": options.get("sinks", 4)})
    finite = np.isfinite(want)
    np.testing.assert_allclose(got.numpy()[finite], want[finite], rtol=2e-5, atol=1e-7)


@many(60)
def test_expected_attention(seed):
    (q, k, v, budget), frequencies = even(seed)
    options = [
        {},
        {"future": 7},
        {"sinks": 1, "epsilon": 0.02},
        {"covariance": False, "future": 40},
        {"value_norms": False},
    ]
    options = options[seed % 5]
    given = q / 2, k, v, max(budget, options.get("sinks", 4))
    kept = ours("expected_attention", *given, frequencies=torch.from_numpy(frequencies), **options)
    options["values"] = options.pop("value_norms", True)
    scores = frontier.scores_expected_attention(*given, inv_freq=frequencies, **options)
    near(kept, frontier.keep(scores, given[1], given[3]), scores, 1e-4)


@many(60)
def test_threshold(seed):
    scores, forced, budget, _ = layers_of(seed)
    scores, forced = scores[0], forced[0]
    heads, n = scores.shape
    tau, must = float(np.quantile(scores, seed % 5 / 4)), torch.zeros(heads, n, dtype=torch.bool)
    for head, tokens in enumerate(forced):
        must[head, tokens] = True
    if n > budget:
        held = torch.from_numpy(scores)
        quota = Threshold(EqualHeads(), tau)(held, must, [n] * heads, budget)
        rank = inverse(ranked(held, must, torch.ones_like(must), None))
        kept = PlacedSelection.of_quota(rank, quota).known().tolist()
        assert kept == frontier.threshold(scores, forced, budget, tau)


def test_a_threshold_keeps_fewer_than_the_budget_and_stands_last():
    q, k, v, _ = draw(12)
    kept = [ours("snapkv+threshold", q, k, v, 100, window=8, tau=tau) for tau in (0.0, 0.03, 2.0)]
    sizes = [[len(head) for head in each] for each in kept]
    assert set(sizes[0]) == {100} and set(sizes[2]) == {8} and all(8 < n < 100 for n in sizes[1])
    for spec in ("snapkv+threshold+adakv", "snapkv+threshold+shared", "snapkv+shared+threshold", "knorm+threshold"):
        with pytest.raises(BadParameter, match="cannot work"):
            parse(spec)


@many(60)
def test_compactor(seed):
    (q, k, v, budget), frequencies = even(seed)
    options = [{}, {"chunk": 8, "sketch": 5}, {"chunk": 5, "sinks": 1, "recent": 1}, {"ridge": 0.5}][seed % 4]
    given = q, k, v, max(budget, options.get("sinks", 8) + options.get("recent", 4))
    kept = ours("compactor", *given, frequencies=torch.from_numpy(frequencies), **options)
    sketch = options.pop("sketch", 48)
    gaussian = CompactorScorer(sketch).directions(q.shape[-1], 0, torch.device("cpu")).double().numpy() * sketch**0.5
    scores = frontier.scores_compactor(*given, inv_freq=frequencies, gaussian=gaussian, **options)
    for mine, theirs, row in zip(kept, frontier.keep(scores, k, given[3]), scores, strict=True):
        worst = min(row[j] for j in theirs)
        assert len(mine) == len(theirs)
        assert all(abs(row[j] - worst) <= 1e-3 for j in set(mine) ^ set(theirs)), (mine, theirs)
    options["sketch"] = sketch
    shared = ours("compactor+adakv:alpha=0.0", *given, frequencies=torch.from_numpy(frequencies), **options)
    most = min(given[3], k.shape[1]) * len(k)
    worst = sorted((score for row in scores for score in row), reverse=True)[most - 1]
    assert sum(map(len, shared)) == most  # standardized over the layer, so heads compare
    assert all(scores[head][j] >= worst - 1e-3 for head, mine in enumerate(shared) for j in mine)


@pytest.mark.parametrize("n", [1, 1023, 2500, 1024])
def test_products_of_blocks_are_the_products(n):
    x = torch.randn(2, n, 5)
    assert torch.allclose(gram(x), x.double().mT @ x.double(), rtol=1e-5, atol=1e-4)
