"""What a window of a reading takes, in kernels, equals torch's functions. Run by test_triton.py."""

from itertools import product

import pytest
import torch
from conftest import make_llama
from decode_cases import BOUND, DEVICE, drawn, off, pairs
from host_gather_cases import with_store

import kvkeep
from kvkeep.kernels.dispatch import KernelDispatch
from kvkeep.kernels.torch import retrieval_units, slotted
from kvkeep.kernels.triton import retrieval_attention, row_queries, unit_scores, unit_select
from kvkeep.storage.offload.pinned import HostBlockTable

KINDS = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 0, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def bound(kind):
    """The result of a lower precision is rounded to it, whoever computes it."""
    return BOUND.get(kind, 2e-3) + ROUNDING[kind]


def window(heads, kv_heads, w, far, near, dim, wide, kind):
    """As a layer has them: queries and near keys are parts of more, heads lie behind each other."""
    queries = drawn(w + 3, heads, dim, kind=kind, scale=2).transpose(0, 1)[:, 2 : w + 2]
    rotated = drawn(heads, w, dim, kind=kind, scale=2)
    away = tuple(drawn(kv_heads, far, size, kind=kind) for size in (dim, wide))
    here = tuple(drawn(kv_heads, near + 7, size, kind=kind)[:, 4 : near + 4] for size in (dim, wide))
    return queries, rotated, away, here


def wide_floats(queries, rotated, away, here):
    return queries.float(), rotated.float(), *(tuple(t.float() for t in pair) for pair in (away, here))


SHAPES = [  # heads, kv_heads, w, far, near, dim, wide, band
    (1, 1, 1, 0, 1, 16, 16, 4),
    (8, 2, 1, 130, 90, 64, 64, 20),
    (4, 4, 2, 3, 2, 16, 16, 1),
    (8, 2, 16, 40, 48, 32, 32, 16),
    (7, 1, 13, 65, 30, 24, 24, 100),
    (8, 2, 64, 64, 64, 64, 64, 64),
    (4, 1, 70, 130, 201, 24, 40, 37),
    (3, 3, 129, 0, 150, 48, 16, 5),
    (4, 2, 20, 33, 90, 128, 128, 1),
]


def windows():
    """Shapes, a softcap and sinks or neither, kinds: all on a GPU. The interpreter, which is slow, gets each shape
    with float32, which has blocks of its own, and one of the others; each kind has a softcap and sinks here and there.
    """
    ways = [(None, False), (1.5, True)]
    if DEVICE == "cuda":
        return list(product(SHAPES, ways, KINDS))
    kinds = [(torch.float32, KINDS[1 + i // 2 % 2])[:: 1 - 2 * (i % 2)] for i in range(len(SHAPES))]
    return [(shape, *case) for shape, mine in zip(SHAPES, kinds, strict=True) for case in zip(ways, mine, strict=True)]


@pytest.mark.parametrize("shape, way, kind", windows(), ids=str)
def test_two_region_attention(shape, way, kind):
    (heads, kv_heads, w, far, near, dim, wide, band), (softcap, sunk) = shape, way
    torch.manual_seed(w)
    queries, rotated, away, here = given = window(heads, kv_heads, w, far, near, dim, wide, kind)
    sinks = drawn(heads, kind=kind) if sunk else None
    before = torch.rand(near - w, device=DEVICE) if near > w else None
    rest = 0.3, softcap, sinks, band, before
    got, mass = retrieval_attention.two_region_attention(queries, rotated, (lambda: away) if far else None, here, *rest)
    wants, turns, aways, heres = wide_floats(*given)
    want, known = slotted.two_region_attention(wants, turns, (lambda: aways) if far else None, heres, *rest)
    assert got.dtype == kind and got.shape == (heads, w, wide) and off(got, want) <= bound(kind)
    assert mass.shape == (near,) and off(mass, known) <= BOUND[torch.float32]
    gather = (lambda: away) if far else None
    alone, none = retrieval_attention.two_region_attention(queries, rotated, gather, here, *rest[:3])
    assert alone.equal(got) and none is None
    had = None if before is None else torch.rand(heads, near - w + 5, device=DEVICE)[:, 5:]  # a part of more
    rest = *rest[:-1], had, True
    again, mass = retrieval_attention.two_region_attention(queries, rotated, gather, here, *rest)
    known = slotted.two_region_attention(wants, turns, (lambda: aways) if far else None, heres, *rest)[1]
    assert again.equal(got) and mass.shape == (heads, near) and off(mass, known) <= BOUND[torch.float32]


def test_only_queries_close_behind_a_key_count_and_never_its_own():
    queries, rotated, away, here = window(2, 1, 6, 5, 9, 16, 16, torch.float32)
    for band, before in product((1, 3, 8, 50), (None, torch.ones(4, device=DEVICE))):
        rest = lambda: away, here, 0.3, None, None, band, before  # noqa: E731
        got, want = (each.two_region_attention(queries, rotated, *rest)[1] for each in (retrieval_attention, slotted))
        assert off(got, want) <= 1e-5 and got[-1] == 0
    assert (
        retrieval_attention.two_region_attention(queries, rotated, None, here, 0.3, None, None, 1)[1][:2].eq(0).all()
    )  # too far behind


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "heads, kv_heads, w, dim, asked", [(1, 1, 1, 16, 0), (8, 2, 5, 24, 3), (7, 1, 64, 48, 0), (4, 4, 70, 40, 70)]
)
def test_weighted_query(heads, kv_heads, w, dim, asked, kind):
    torch.manual_seed(w)
    moments, question = None, drawn(asked, kv_heads * dim) if asked else None
    for _ in range(2):
        queries = (drawn(heads, w, dim, kind=torch.float32, scale=2) + 5).to(kind)
        queries[..., 3] = 1.5  # never varies
        before = (moments.count, moments.mean, moments.variance) if moments else (0, None, None)
        want = retrieval_units.weighted_query(queries, kv_heads, *before, question)
        got = row_queries.weighted_query(queries, kv_heads, *before, question)
        assert all(off(a, b) <= 2e-5 for a, b in zip(got, want, strict=True))
        moments = retrieval_units.Moments(before[0] + w, *want[:2])


def test_queries_that_never_vary_ask_alike():
    got = row_queries.weighted_query(torch.full((2, 5, 16), 3.0, device=DEVICE), 1, 0, None, None, None)
    assert [float(each[0]) for each in got] == [3.0, 0.0, 3.0]


GROUPS = [  # kv_heads, group, units, size, dim, count
    (1, 1, 1, 1, 16, 4),
    (2, 1, 5, 32, 32, 4),
    (8, 1, 2, 40, 128, 7),
    (2, 2, 5, 32, 32, 4),
    (3, 3, 3, 5, 24, 2),
    (1, 7, 2, 9, 16, 9),
    (4, 4, 2, 40, 128, 7),
]


@pytest.mark.parametrize("shape, cosine, kind", pairs(GROUPS, [False, True], KINDS), ids=str)
def test_unit_representatives(shape, cosine, kind):
    kv_heads, group, units, size, dim, count = shape
    torch.manual_seed(units)
    n, heads = units * size, kv_heads * group
    keys = drawn(kv_heads, n + 9, dim, kind=kind)[:, 4 : n + 4]
    for mass in (torch.rand(heads, n + 3, device=DEVICE), torch.randint(0, 3, (heads, n + 3), device=DEVICE).float()):
        mass = mass[:, 3:]
        both = unit_scores.unit_representatives, retrieval_units.unit_representatives
        got, want = (f(keys, mass, units, count, cosine) for f in both)
        assert got.shape == want.shape and off(got, want) <= 1e-6
        room = torch.full_like(got, 9.0)
        assert unit_scores.unit_representatives(keys, mass, units, count, cosine, room) is room and room.equal(got)
        if count < size and group > 1:  # heads do choose differently
            together = mass.mean(0).expand(kv_heads, -1), units, count, cosine
            assert off(got, retrieval_units.unit_representatives(keys, *together)) > 1e-3


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("units, dim", [(1, 16), (15, 24), (70, 300)])
def test_score_representatives(units, dim, cosine):
    torch.manual_seed(units)
    for kind in KINDS:  # what is known of units is kept as keys are
        vector, about = drawn(dim), drawn(1, units, dim).to(kind)
        score, reference_score = unit_scores.score_representatives, retrieval_units.score_representatives
        assert off(score(vector, about, cosine), reference_score(vector, about, cosine)) <= 1e-5


@pytest.mark.parametrize("heads, units, size, quota", [(1, 1, 32, 0), (1, 1, 4, 8), (2, 9, 1, 5), (3, 2500, 3, 600)])
def test_select_uniform_units(heads, units, size, quota):
    torch.manual_seed(units)
    few = torch.randint(-2, 3, (heads, units), device=DEVICE).float()  # hardly any two are different
    for worth in (drawn(heads, units), few, -few, few * 0, drawn(heads, units, scale=1e-20), drawn(heads, units).abs()):
        want = retrieval_units.select_uniform_units(worth, size, quota)
        assert unit_select.select_uniform_units(worth, size, quota).equal(want)


READING = {"two_region_attention", "score_representatives", "unit_representatives", "select_uniform_units"}
READING |= {"weighted_query", "apply_angles"}


@pytest.mark.parametrize("per_head", [False, True])
def test_a_whole_reading_in_kernels_says_what_torch_says(monkeypatch, per_head):
    """Windows, pieces, a question, tokens written one by one."""
    ids = torch.randperm(112, generator=torch.Generator().manual_seed(0))[None].to(DEVICE)  # none comes twice: no ties
    model = make_llama(vocab_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2).to(DEVICE)
    question = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    said, kept, used = [], [], set()

    def uses_kernel(best, *given):
        fits = not best.broken and best.supports(*given)
        used.update({best.name} if fits else ())
        return fits

    for kernels in (False, True):
        cache = kvkeep.Cache(model, "actqkv", 48, window=16, sinks=3, chunk=8, per_head=per_head)
        cache.backend.question[0] = question
        with monkeypatch.context() as here:
            here.setattr(KernelDispatch, "uses_kernel", uses_kernel if kernels else lambda *_: False)
            if kernels:
                here.setattr(cache.backend, "_empty", with_store(cache.backend))
            else:
                here.setattr(HostBlockTable, "new", lambda device: None)
            steps = ((0, 72), (72, 96), (96, 97), (97, 98), (98, 111))
            said.append(torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in steps], 1))
            kept.append(cache.kept(0))
    assert used >= READING and kept[0] == kept[1]
    assert off(*said) <= 1e-4
