"""A pool's decode step of retrieval methods, kernel by kernel, beside torch's. Run by test_triton.py."""

import pytest
import torch
from decode_cases import DEVICE

from kvkeep.kernels.torch import retrieval_units, slotted
from kvkeep.kernels.triton import host_gather, row_queries, slotted_attention, unit_scores, unit_select
from kvkeep.storage.offload.device_lru import Pair
from kvkeep.storage.offload.host import HostMemoryBudget, HostStore
from kvkeep.storage.offload.pinned import HostBlockTable
from kvkeep.storage.offload.unit_slots import UnitShape, UnitSlots

GPU = torch.cuda.is_available()
KINDS = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def drawn(*shape, kind=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(kind)


def off(got, want):
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-6))


def whole(*numbers):
    return torch.tensor(numbers, device=DEVICE)


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("units", [(1, 70), (33, 0), (70, 16)])
def test_units_of_rows_are_scored(units, cosine):
    torch.manual_seed(0)
    vectors, entries, bounds = drawn(2, 48), drawn(2, 70, 48), drawn(6, 70, 2, 24)
    got = unit_scores.score_representatives(vectors, entries, cosine, whole(*units))
    want = retrieval_units.score_representatives(vectors, entries, cosine)
    pages = unit_scores.score_page_bounds(drawn(12, 24) * 0 + 1, bounds, whole(*units)).view(2, 3, 70)
    plain = retrieval_units.score_page_bounds(torch.ones(12, 24, device=DEVICE), bounds).view(2, 3, 70)
    for row, n in enumerate(units):
        if n:
            assert off(got[row, :n], want[row, :n]) <= 1e-5 and off(pages[row, :, :n], plain[row, :, :n]) <= 1e-5


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("heads, kv_heads, most, dim, units", [(4, 2, 300, 16, (300, 1, 129)), (3, 1, 64, 40, (64, 0))])
def test_heads_vote_for_tokens(heads, kv_heads, most, dim, units, kind):
    torch.manual_seed(most)
    queries, keys = drawn(len(units), heads, dim, kind=kind), drawn(len(units), kv_heads, most, dim, kind=kind)
    got = unit_scores.score_tokens(queries, keys, 0.3, whole(*units))
    want = retrieval_units.score_tokens(queries, keys, 0.3, whole(*units))
    for row, n in enumerate(units):
        if n:
            assert off(got[row, :n], want[row, :n]) <= 1e-5


@pytest.mark.parametrize("few", [unit_select.FEW, 0], ids=["one program", "many"])
@pytest.mark.parametrize("lists", [1, 3])
def test_as_many_units_as_each_row_has_room_for(lists, few, monkeypatch):
    torch.manual_seed(lists)
    monkeypatch.setattr(unit_select, "FEW", few)
    units, counts = whole(5000, 7, 0, 64), whole(600, 9, 3, 0)
    for scores in (drawn(4, lists, 5000), torch.randint(-2, 3, (4, lists, 5000), device=DEVICE).float()):
        got, want = (torch.full((4, lists, 600), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
        unit_select.select_counted(scores, units, counts.clamp_max(units), got)
        retrieval_units.select_counted(scores, units, counts.clamp_max(units), want)
        assert got.equal(want) and (got[2:] == -7).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("lists, own_index", [(1, False), (2, False), (1, True)])
def test_units_come_from_where_they_are(lists, own_index, kind):
    """Many steps of two rows: blocks of any size in host memory, the last one on the device."""
    torch.manual_seed(lists)
    unit, sinks, most, dims = 3, 2, 5, (24, 40)
    layer = UnitSlots(UnitShape(unit, sinks, most, lists, 2, *dims, kind), 3, 30, 9, 10, torch.device(DEVICE))
    layer.by_device, tokens = True, {}
    for row, sizes in ((0, (6, 15, 3, 30)), (2, (9,))):
        table = HostBlockTable(torch.empty(3, 64, dtype=torch.int64, device=DEVICE))
        device = torch.device(DEVICE, 0) if GPU else torch.device("cpu")
        host = HostStore(HostMemoryBudget(), device, table=table)
        pieces = [[drawn(2, n, d, kind=kind) for d in dims] for n in sizes]
        for piece in pieces:
            host = host.put(*piece)
        tail = Pair(*(drawn(2, 20, d, kind=kind)[:, 2:] for d in dims))
        tokens[row] = [torch.cat([*part, last], 1) for *part, last in zip(*pieces, tail, strict=True)]
        given = tokens[row][0].clone() * 2 if own_index else None
        if own_index:
            tokens[row][0] = given
        layer.admit(row, host, tail, given)
    before = layer.pair.map(torch.clone)
    for step in range(12):
        counts = whole(*([5, 0, 3] if step % 3 else [4, 0, 5]))
        selected = torch.zeros(3, lists, most, dtype=torch.int32, device=DEVICE)
        for row, of in tokens.items():
            for each in range(lists):
                some = torch.randperm(min(8 + step, of[0].shape[1] // unit))[: int(counts[row])].sort().values
                selected[row, each, : len(some)] = some
        host_gather.fetch_units(*layer.arguments(selected, counts, whole(*[step + 7] * 3)))
        for row, of in tokens.items():
            for head in range(2):
                here = selected[row, head % lists, : int(counts[row])].long()
                places = layer.slots[row, head % lists, : int(counts[row])].long()
                assert len(set(places.tolist())) == len(places)
                for part, want in zip(layer.pair, of, strict=True):
                    lies = part[row, head, sinks:].view(-1, unit, part.shape[-1])[places]
                    assert lies.equal(want[head, : want.shape[1] // unit * unit].view(-1, unit, want.shape[-1])[here])
    for part, old in zip(layer.pair, before, strict=True):
        assert part[1].equal(old[1]) and part[:, :, :sinks].equal(old[:, :, :sinks])


def test_what_is_there_is_not_read_again():
    unit, device = 2, torch.device(DEVICE)
    layer = UnitSlots(UnitShape(unit, 0, 3, 1, 1, 16, 16, torch.float32), 1, 20, 4, 6, device)
    layer.by_device = True
    empty = HostStore(HostMemoryBudget(), torch.device(DEVICE, 0) if GPU else device, table=None)
    tail = Pair(*(drawn(1, 40, 16) for _ in range(2)))
    layer.admit(0, empty, tail, None)

    def fetch(step, *units):
        selected = torch.tensor([[[*units]]], dtype=torch.int32, device=DEVICE)
        host_gather.fetch_units(*layer.arguments(selected, whole(3), whole(step)))

    fetch(1, 0, 1, 2)
    first = layer.slots[0, 0].tolist()
    tail.keys.zero_()
    fetch(2, 1, 2, 9)
    assert layer.slots[0, 0, :2].tolist() == first[1:] and layer.pair.keys[0, 0].abs().sum(-1).ne(0).sum() == 3 * unit
    fetch(3, 5, 6, 9)
    fetch(4, 1, 2, 9)  # six slots: only units 0, 1 and 2 were unused for two steps, and one of them was overwritten
    assert layer.pair.keys[0, 0].abs().sum(-1).ne(0).sum() >= unit


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("how", ["plain", "sinks and cap", "angles", "mass", "mass per head", "each head"])
def test_attention_over_slots_and_near_tokens(how, kind):
    torch.manual_seed(3)
    rows, heads, kv_heads, dim, v_dim, unit, sinks, size = 4, 6, 2, 24, 40, 3, 4, 150
    lists, per_head = kv_heads if how == "each head" else 1, how == "mass per head"
    queries, rotated = drawn(rows, heads, dim, kind=kind), drawn(rows, heads, dim, kind=kind)
    far = tuple(drawn(rows, kv_heads, sinks + 40 * unit, d, kind=kind) for d in (dim, v_dim))
    near = tuple(drawn(rows, kv_heads, size, d, kind=kind) for d in (dim, v_dim))
    slots = torch.stack([torch.randperm(40, device=DEVICE)[:30] for _ in range(rows * lists)])
    slots = slots.view(rows, lists, 30).to(torch.int32)
    num_far, begin, end = whole(sinks + 90, 0, sinks, sinks + 6), whole(3, 0, 70, 0), whole(150, 5, 71, 0)
    end = torch.stack([end, end + 7], 1)[:, 0]  # as a pool has it: one KV head's lengths of many
    options = {"active": whole(1, 0, 1, 1)}
    if how == "sinks and cap":
        options |= {"softcap": 4.0, "sink_logits": drawn(heads)}
    if how == "angles":
        angle = torch.rand(100, dim // 2, device=DEVICE)
        options["angles"] = angle.cos(), angle.sin()
    mass = drawn(rows, heads if per_head else 1, size).abs() if "mass" in how else None
    if mass is not None:
        mass[torch.arange(rows), :, end.cpu() - 1] = 0  # the newest has got nothing so far
    masses = [None if mass is None else mass.clone() for _ in range(2)]
    num_far[3] = 0  # an empty row
    given = queries, rotated, far, slots, num_far, near, begin, end, sinks, unit, 0.3
    both = slotted_attention.slotted_attention, slotted.slotted_attention
    got, want = (f(*given, **options, mass=m, band=50) for f, m in zip(both, masses, strict=True))
    assert got.shape == want.shape and off(got, want) <= (1e-5 if kind == torch.float32 else 2e-2)
    assert (got[3] == 0).all()
    if mass is not None:
        assert off(masses[0], masses[1]) <= (1e-5 if kind == torch.float32 else 1e-2)
        assert masses[0][1].equal(mass[1]) and not masses[0][0].equal(mass[0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_query_for_each_row_and_its_moments(kind):
    torch.manual_seed(5)
    queries, moments = drawn(6, 3, 24, kind=kind).transpose(0, 1), drawn(3, 2, 48).abs()
    weight = torch.tensor([0.25, 0.0, 0.01], device=DEVICE)
    each = [moments.clone() for _ in range(2)]
    both = row_queries.mean_queries, retrieval_units.mean_queries
    got, want = (f(queries, 2, m, weight) for f, m in zip(both, each, strict=True))
    assert off(got, want) <= 1e-6 and off(*each) <= 1e-6 and each[0][1].equal(moments[1])
    assert row_queries.mean_queries(queries, 2, None, weight).equal(got)


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_layers_share_a_quota(layer):
    torch.manual_seed(layer)
    units, left = whole(2500, 0, 1, 40), whole(300, 9, 12, 100)
    scores, densities = drawn(4, 2500) / 3, torch.rand(4, 5, 2, device=DEVICE, dtype=torch.float64) * 8
    densities[0, 3:, 0] = densities[3, 2, 0] = float("nan")
    densities[..., 1] = whole(0, 3, 0, 7)[:, None]
    each = [(left.clone(), densities.clone()) for _ in range(2)]
    both = row_queries.share_quota, retrieval_units.share_quota
    got, want = (f(scores, units, *given, layer, 40) for f, given in zip(both, each, strict=True))
    assert got.equal(want) and got[1] == 0 and got.max() <= 40
    assert each[0][0].equal(each[1][0]) and off(*(d.nan_to_num(-1) for _, d in each)) <= 1e-5
    assert each[0][1][1].equal(densities[1]) and not each[0][1][0].equal(densities[0])
