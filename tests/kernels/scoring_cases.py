"""Random and edge shapes for the kernels that compare, cluster and look up tokens, each beside its torch twin."""

from dataclasses import replace

import pytest
import torch
from decode_cases import BOUND, DEVICE, drawn, pairs
from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.compress.retrieval.index import Bounds, Centres, OffloadedTokens, Representatives, RetrievalQuery
from kvkeep.kernels.torch import scoring
from kvkeep.kernels.torch.retrieval_units import concat_heads
from kvkeep.kernels.torch.scoring import entropy, probabilities
from kvkeep.kernels.triton import divergence, key_products, unit_scores
from kvkeep.types import PAD_POSITION

TIE = 1e-6  # cosines this close are the same to float32


def off(got, want):
    """Largest difference, relative to the largest value."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-6))


# In torch: what the kernels are checked against.


def plain_rows(queries, keys, positions, seq_len, scale, softcap, sinks):
    """compress/attention.py::attention, all heads in one list. [heads, w, n]"""
    seen = positions[:, None] <= torch.arange(seq_len - queries.shape[1], seq_len, device=DEVICE)[:, None]
    return probabilities(queries, keys, seen, scale, softcap, sinks, allow_fully_masked=True).flatten(0, 1)


def plain_distance(rows: Tensor, smooth: int, stepwise: bool = False) -> Tensor:
    """scoring.row_js_distance in double: entropies of 10 leave float32 no digits."""
    rows = rows.double()
    band = torch.ones(rows.shape[1], rows.shape[1], dtype=rows.dtype, device=rows.device).triu().tril(smooth - 1)
    smoothed = (band / (band @ rows.sum(-1, keepdim=True)).clamp_min(1e-30)) @ rows
    other = [max(0, row - 1) if stepwise else 0 for row in range(rows.shape[1])]
    disorder, between = entropy(smoothed), entropy((smoothed + smoothed[:, other]) / 2)
    return (between - (disorder + disorder[:, other]) / 2).clamp_min(0).sqrt()


def plain_cosines(keys: Tensor, centres: Tensor, sizes: Tensor) -> Tensor:
    """scoring.assign before the maximum, in double."""
    cosines = normalize(keys.double(), dim=-1) @ normalize(centres.double(), dim=-1).transpose(1, 2)
    return cosines - 4.0 * (sizes == 0)[:, None]


def plain_centroids(query: Tensor, representatives: Tensor) -> Tensor:
    """compress/retrieval/index.py::Representatives.worth (one head) and ::Centres.worth (each its own)."""
    return (representatives.float() @ query.float()[..., None])[..., 0]


def plain_bounds(query: Tensor, bounds: Tensor) -> Tensor:
    """compress/retrieval/index.py::Bounds.worth."""
    query = query.float().view(len(bounds), -1, query.shape[-1])
    low, high = bounds.float().unbind(2)
    up, down = query.clamp_min(0).mean(1)[:, None], query.clamp_max(0).mean(1)[:, None]
    return (up * high).sum(-1) + (down * low).sum(-1)


def test_the_twins_are_what_the_library_does():
    torch.manual_seed(0)
    queries, keys, member = drawn(4, 3, 16), drawn(2, 30, 16), torch.randint(0, 5, (2, 30), device=DEVICE)
    asking, leaving = RetrievalQuery(queries, 2, 0.5), OffloadedTokens(keys, drawn(30).abs(), member, 5)
    query, sizes = queries.mean(1), torch.ones(2, 5, device=DEVICE)
    bounds, centres = Bounds().build(leaving), Centres().build(leaving)
    near = torch.testing.assert_close
    near(plain_bounds(query, bounds), Bounds().score(asking, bounds, sizes))
    near(scoring.means(keys, member, 5)[0], centres)
    near(plain_centroids(query.view(2, 2, 16).mean(1) * 0.5, centres), Centres().score(asking, centres, sizes))
    about = Representatives().build(replace(leaving, member=member[:1]))
    near(plain_centroids(concat_heads(queries, 2).mean(0)[None], about), Representatives().score(asking, about, sizes))
    sizes = torch.tensor([[3, 0, 1, 1, 9], [0, 0, 1, 1, 0]], device=DEVICE)
    near(plain_cosines(keys, centres, sizes).argmax(-1), scoring.assign(keys, centres, sizes))
    positions = torch.arange(30, device=DEVICE).expand(2, -1)
    rows = plain_rows(queries, keys, positions, 30, 0.5, None, None)
    want = scoring.js_distance(queries, keys, positions, 30, 2, 0.5)
    near(plain_distance(rows, 2).float(), want, rtol=1e-3, atol=1e-3)


# Comparing rows


DISTANCES = [  # heads, kv_heads, w, n, dim, seq_len, smooth
    (1, 1, 1, 1, 16, 1, 8),
    (4, 2, 5, 9, 16, 9, 2),
    (6, 3, 33, 300, 24, 300, 8),
    (2, 2, 64, 130, 8, 400, 1),
    (4, 1, 64, 700, 64, 700, 100),
    (2, 1, 20, 5, 16, 40, 3),
]
COMPARED = [  # softcap, sunk, stepwise
    (None, False, False),
    (2.0, False, False),
    (1.5, True, False),
    (None, False, True),
    (1.5, True, True),
]


@pytest.mark.parametrize("shape, compared, kind", pairs(DISTANCES, COMPARED, BOUND), ids=str)
def test_distance(shape, compared, kind):
    (heads, kv_heads, w, n, dim, seq_len, smooth), (softcap, sunk, stepwise) = shape, compared
    torch.manual_seed(n)
    queries, keys = drawn(heads, w, dim, kind=kind, scale=2), drawn(kv_heads, n, dim, kind=kind)
    positions = torch.stack([torch.randperm(seq_len)[:n].sort().values for _ in range(kv_heads)]).int().to(DEVICE)
    if seq_len > n > 5:
        positions[-1, n // 2 :] = PAD_POSITION  # a shorter head
    sinks = drawn(heads, scale=3) if sunk else None
    got = divergence.js_distance(queries, keys, positions, seq_len, smooth, 0.3, softcap, sinks, stepwise)
    rows = plain_rows(queries, keys, positions, seq_len, 0.3, softcap, sinks)
    assert off(got, plain_distance(rows, smooth, stepwise)) <= BOUND[kind]
    assert off(got, scoring.row_js_distance(rows, smooth, stepwise)) <= 5e-3  # its own noise
    assert got[:, 0].eq(0).all()


def test_distance_of_equal_queries_is_nothing():
    queries, keys = drawn(2, 1, 16).expand(-1, 12, -1), drawn(1, 200, 16)
    positions = torch.arange(200, dtype=torch.int32, device=DEVICE)[None]
    got = divergence.js_distance(queries, keys, positions, 300, 4, 0.3)  # all of them see every key
    assert got.max() < 1e-6


def test_distance_of_rows_that_share_nothing_is_the_root_of_ln_2():
    queries, keys = 90 * torch.eye(16, device=DEVICE)[None, [0, 0, 1, 1]], torch.eye(16, device=DEVICE)[None, :2]
    how = queries, keys, torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), 9, 1, 1.0
    assert divergence.js_distance(*how)[0].tolist() == pytest.approx([0, 0, 0.8325546, 0.8325546], abs=1e-6)
    stepwise = divergence.js_distance(*how, None, None, True)
    assert stepwise[0].tolist() == pytest.approx([0, 0, 0.8325546, 0], abs=1e-6)  # only the third moved


# Clusters


@pytest.mark.parametrize("kind", [*BOUND, torch.float16], ids=str)
@pytest.mark.parametrize("heads, n, c, dim", [(1, 1, 1, 16), (2, 9, 4, 24), (3, 130, 70, 20), (2, 150, 129, 64)])
def test_assign(heads, n, c, dim, kind):
    torch.manual_seed(n)
    keys, centres = drawn(heads, n, dim, kind=kind), drawn(heads, c, dim)
    sizes = torch.randint(0, 3, (heads, c), device=DEVICE)
    sizes[:, c // 2] = 1
    for size in (None, sizes):
        cosines = plain_cosines(keys, centres, torch.ones_like(sizes) if size is None else size)
        got = key_products.assign(keys, centres, size)
        # another choice than the reference's is right only if its cosine, in double, is the highest but for a hair
        assert got.dtype == torch.int64
        assert (cosines.amax(-1) - cosines.gather(-1, got[..., None])[..., 0]).max() <= TIE
        two = cosines.topk(min(2, c), -1).values
        clear = two[..., 0] - two[..., -1] > 2 * TIE
        assert got[clear].equal(cosines.argmax(-1)[clear])


@pytest.mark.parametrize("kind", BOUND, ids=str)
def test_assign_gives_ties_to_the_lower_number(kind):
    torch.manual_seed(0)
    keys, centres = drawn(1, 50, 16, kind=kind), drawn(1, 40, 16)
    once = key_products.assign(keys, centres)
    assert key_products.assign(keys, torch.cat([centres, centres, 2 * centres], 1)).equal(
        once
    )  # in other blocks, and longer
    nothing = torch.zeros(1, 3, 16, device=DEVICE, dtype=kind)
    assert key_products.assign(nothing, centres).eq(0).all()
    sizes = torch.tensor([[0, 0, 5, *[1] * 37]], device=DEVICE)
    assert key_products.assign(nothing, centres, sizes).eq(2).all()
    assert (
        key_products.assign(keys, centres, torch.zeros_like(sizes)).eq(0).all()
    )  # nobody in reach: as torch's maximum


@pytest.mark.parametrize("kind", BOUND, ids=str)
@pytest.mark.parametrize("heads, n, c, dim", [(1, 1, 1, 16), (2, 9, 4, 24), (3, 130, 7, 20), (1, 40, 60, 64)])
def test_means(heads, n, c, dim, kind):
    torch.manual_seed(n)
    keys, member = drawn(heads, n, dim, kind=kind), torch.randint(0, c, (heads, n), device=DEVICE)
    member[-1, n // 2 + 1 :] = c  # a shorter head: padding is nobody's
    member[member == c // 2] = 0  # a cluster without members (where there are two)
    (got, size), (want, count) = key_products.means(keys, member, c), scoring.means(keys, member, c)
    assert size.equal(count) and got[size == 0].eq(0).all()
    assert off(got, want) <= BOUND[torch.float32]
    assert key_products.means(keys, member, c)[0].equal(got)


@pytest.mark.parametrize("kind", BOUND, ids=str)
@pytest.mark.parametrize("heads, n, dim, kappa", [(1, 1, 16, 5), (2, 9, 24, 5), (3, 130, 20, 2), (2, 40, 64, 45)])
def test_key_similarity(heads, n, dim, kappa, kind):
    torch.manual_seed(n)
    keys, real = drawn(heads, n, dim, kind=kind), torch.ones(heads, n, dtype=torch.bool, device=DEVICE)
    real[-1, n // 2 + 1 :] = False
    want = scoring.key_similarity(keys, real, kappa)
    got = key_products.key_similarity(keys, real, kappa)
    assert off(got[real], want[real]) <= BOUND[torch.float32]


# Looking up


@pytest.mark.parametrize("kind", BOUND, ids=str)
@pytest.mark.parametrize("heads, units, dim", [(1, 1, 16), (1, 50, 520), (3, 17, 24), (2, 33, 128)])
def test_score_centroids(heads, units, dim, kind):
    torch.manual_seed(units)
    query, about = drawn(heads, dim, kind=kind), drawn(heads, units, dim, kind=kind)
    for asked in (query, query.float()):
        got = unit_scores.score_representatives(asked, about, False)
        assert off(got, plain_centroids(query, about)) <= BOUND[torch.float32]


@pytest.mark.parametrize("kind", BOUND, ids=str)
@pytest.mark.parametrize(
    "heads, kv_heads, units, dim", [(1, 1, 1, 16), (6, 3, 17, 24), (8, 2, 33, 128), (4, 1, 5, 160)]
)
def test_score_page_bounds(heads, kv_heads, units, dim, kind):
    torch.manual_seed(units)
    query = drawn(heads, dim, kind=kind)
    bounds = drawn(kv_heads, units, 2, dim, kind=kind).sort(2).values
    assert off(unit_scores.score_page_bounds(query, bounds), plain_bounds(query, bounds)) <= BOUND[torch.float32]


@pytest.mark.parametrize(
    "heads, kv_heads, n, dim", [(1, 1, 1, 16), (6, 2, 200, 24), (4, 4, 1030, 32), (4, 1, 128, 128)]
)
def test_quadratic_form(heads, kv_heads, n, dim):
    torch.manual_seed(n)
    keys = drawn(n + 1, kv_heads, dim, kind=torch.bfloat16).transpose(0, 1)[:, 1:]
    matrices, vectors = drawn(heads, dim, dim), drawn(heads, dim, scale=3)
    repeated = keys.double().repeat_interleave(heads // kv_heads, 0)
    want = ((repeated @ matrices.double() + vectors.double()[:, None]) * repeated).sum(-1)
    assert off(scoring.quadratic_form(keys, matrices, vectors), want) <= BOUND[torch.float32]
    assert off(key_products.quadratic_form(keys, matrices, vectors), want) <= BOUND[torch.float32]
