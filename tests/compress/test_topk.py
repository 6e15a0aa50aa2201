"""Which units are retrieved, and how layers share a budget, against float64 oracles."""

import numpy as np
import pytest
import torch
from draws import many, noise, single
from oracles import reading
from oracles import retrieval as r

from kvkeep.compress.retrieval.index import NEG_INF, select_units
from kvkeep.kernels.dispatch import select_uniform_units
from kvkeep.kernels.torch.retrieval_units import density, density_share


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
    assert float(density(single(score))) == pytest.approx(r.entropy(score), rel=1e-5, abs=1e-5)


@pytest.mark.core
@many(60)
def test_layers_share_by_density(seed):
    rng = np.random.default_rng(seed)
    layers, steps, unit = int(rng.integers(1, 9)), int(rng.integers(1, 6)), int(rng.choice([1, 8, 32]))
    total = unit * layers * int(rng.integers(0, 50)) + unit * int(rng.integers(0, 2)) * int(rng.integers(0, layers))
    densities = [(rng.random(layers) * 5).tolist() for _ in range(steps)]
    first = (rng.random(layers) * 5).tolist()
    if seed % 3 == 0:  # equal densities share equally, whatever their rounding; and so does no density at all
        densities, first = [[[2.3, 0.0][seed % 2]] * layers] * steps, [[2.3, 0.0][seed % 2]] * layers
    for step, want in enumerate(reading.density_shares(densities, first, total, unit)):
        means = first if step == 0 else np.mean(densities[:step], 0).tolist()
        left, got = total // unit, []
        for layer, now in enumerate(densities[step]):
            got.append(density_share(now, means[layer + 1 :], left))
            left -= got[-1]
        assert [share * unit for share in got] == want and left >= 0 and min(got) >= 0
