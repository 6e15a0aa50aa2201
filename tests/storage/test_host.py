"""Offloaded keys and values in host memory: gathering is plain indexing, and the budget is exact."""

import numpy as np
import pytest
import torch
from draws import CPU, fill, many, same, some

from kvkeep.errors import StoreFull
from kvkeep.storage.offload.host import HostMemoryBudget, HostStore, runs


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


def test_what_was_not_stored_is_not_paid_for(monkeypatch):
    host_budget, keys = HostMemoryBudget(10_000), torch.zeros(1, 10, 8)

    def full(*_):
        raise MemoryError("no host memory just now")

    monkeypatch.setattr(HostStore, "_copy_to_host", full)
    with pytest.raises(MemoryError):
        HostStore(host_budget, CPU).put(keys, keys)
    assert host_budget.used_bytes == 0
