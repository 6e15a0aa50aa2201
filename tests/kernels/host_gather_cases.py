"""Slabs in host memory, written and read by kernels, equal plain indexing. Run by test_triton.py."""

import mmap
import platform
from itertools import accumulate

import numpy as np
import pytest
import torch
from conftest import make_llama

import kvkeep
from kvkeep.kernels.torch import elementwise
from kvkeep.kernels.triton import host_gather, layer_ops
from kvkeep.storage.offload.host import HostMemoryBudget, HostStore
from kvkeep.storage.offload.pinned import HostBlockTable

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KINDS = [torch.float32, torch.bfloat16]
LOW = 0x40 if platform.machine() == "x86_64" else 0  # MAP_32BIT, which Linux has only there


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def drawn(*shape, kind):
    return torch.randn(*shape, device=DEVICE).to(kind)


def home(like):
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=GPU)


def settled(blocks):
    """Once the device is done with them."""
    if GPU:
        torch.cuda.synchronize()
    return blocks


def filled(sizes, heads, dim, wide, kind, capacity=None):
    """Slabs put one after the other, the table, and all of them as two plain tensors."""
    table = torch.full((3, capacity or len(sizes)), -1, dtype=torch.int64, device=DEVICE)
    blocks, pieces = [], []
    for slot, (n, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        near = [drawn(heads, n + 5, d, kind=kind)[:, 2 : 2 + n] for d in (dim, wide)]  # as a part of more
        blocks.append(tuple(home(t) for t in near))
        host_gather.put(*near, blocks[-1], table, slot, end)
        pieces.append(near)
    return blocks, table, tuple(torch.cat(part, 1) for part in zip(*pieces, strict=True))


SHAPES = [  # sizes of slabs, heads, dim, wide
    ([1], 1, 16, 16),
    ([5], 2, 24, 24),
    ([8, 8, 8], 2, 64, 64),
    ([1, 1, 1, 1, 1], 3, 24, 40),
    ([32, 7, 56, 1, 16], 4, 128, 128),
    ([3, 1, 40, 2, 9, 17, 33], 1, 128, 64),
]


def test_a_home_at_a_low_address():
    """Where a Python's heap lies in the first 2 GiB, an address is a number of 32 bits."""
    size = 2 * 8 * 16 * 4
    memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | LOW), np.uint8)
    lies, driver = torch.from_numpy(memory), torch.cuda.cudart() if GPU else None
    assert lies.data_ptr() < 2**31 or not LOW
    if GPU:
        assert driver.cudaHostRegister(lies.data_ptr(), len(memory), 0) == driver.cudaError.success
    homes = tuple(lies[at : at + size].view(torch.float32).view(2, 8, 16) for at in (0, size))
    keys, values = (drawn(2, 8, 16, kind=torch.float32) for _ in range(2))
    table = torch.empty(3, 1, dtype=torch.int64, device=DEVICE)
    host_gather.put(keys, values, homes, table, 0, 8)
    assert all(got.equal(want.cpu()) for got, want in zip(settled(homes), (keys, values), strict=True))
    assert table[:, 0].tolist() == [*(t.data_ptr() for t in homes), 8]
    if GPU:
        assert driver.cudaHostUnregister(lies.data_ptr()) == driver.cudaError.success


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sizes, heads, dim, wide", SHAPES)
def test_what_is_put_lies_there(sizes, heads, dim, wide, kind):
    torch.manual_seed(len(sizes))
    blocks, table, whole = filled(sizes, heads, dim, wide, kind, len(sizes) + 3)
    for got, want in zip(zip(*settled(blocks), strict=True), whole, strict=True):
        assert torch.cat(got, 1).equal(want.cpu())
    columns = [[*(t.data_ptr() for t in block), end] for block, end in zip(blocks, accumulate(sizes), strict=True)]
    assert table.T.tolist() == columns + [[-1] * 3] * 3  # no other column is touched


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("each", [False, True], ids=["one index", "one per head"])
@pytest.mark.parametrize("sizes, heads, dim, wide", SHAPES)
def test_gathering_is_indexing(sizes, heads, dim, wide, each, kind):
    torch.manual_seed(len(sizes))
    blocks, table, whole = filled(sizes, heads, dim, wide, kind, 2 * len(sizes))
    n, rows = sum(sizes), heads if each else 1
    ends = list(accumulate(sizes))
    border = sorted({0, n - 1, *(end - 1 for end in ends), *ends[:-1]})  # the first and last token of every slab
    picks = [torch.randperm(n)[:k].sort().values for k in {1, n, (n + 1) // 2} for _ in range(rows)]
    for index in (*torch.stack([torch.tensor(border)] * rows)[None], *split(picks, rows)):
        index = index.to(DEVICE)
        k = index.shape[1]
        got = tuple(torch.full((heads, k, d), 9.0, dtype=kind, device=DEVICE) for d in (dim, wide))
        host_gather.gather(index, table, len(sizes), *got)
        for have, part in zip(got, whole, strict=True):
            assert have.equal(part.gather(1, index.expand(heads, -1)[..., None].expand(-1, -1, part.shape[-1])))
    assert len(blocks) == len(sizes)  # held until all is read


def split(picks, rows):
    return [torch.stack(picks[i : i + rows]) for i in range(0, len(picks), rows)]


def test_only_the_slabs_counted_are_looked_at():
    """Another store may have filled further columns of the same table."""
    blocks, table, whole = filled([4, 6, 5], 2, 32, 32, torch.float32)
    index = torch.arange(10, device=DEVICE)[None]
    got = tuple(torch.empty(2, 10, 32, device=DEVICE) for _ in range(2))
    host_gather.gather(index, table, 2, *got)
    assert all(have.equal(part[:, :10]) for have, part in zip(got, whole, strict=True)) and blocks


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("first", [0, 3, 8, 13])
def test_behind_what_stands_in_front(first, kind):
    blocks, table, whole = filled([4, 6, 5], 2, 24, 40, kind)
    front = tuple(drawn(2, first, d, kind=kind) for d in (24, 40))
    index = torch.tensor([[0, 3, 4, 9, 10, 11, 14], [1, 2, 3, 4, 5, 6, 7]], device=DEVICE)
    got = tuple(torch.full((2, first + 7, d), 9.0, dtype=kind, device=DEVICE) for d in (24, 40))
    host_gather.gather(index, table, 3, *got, front)
    for have, part, before in zip(got, whole, front, strict=True):
        behind = part.gather(1, index[..., None].expand(-1, -1, part.shape[-1]))
        assert have.equal(torch.cat([before, behind], 1))
    assert blocks


def test_many_slabs():
    blocks, table, whole = filled([1 + i % 3 for i in range(70)], 1, 32, 32, torch.bfloat16, 128)
    n = whole[0].shape[1]
    got = tuple(torch.empty(1, n, 32, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    host_gather.gather(torch.arange(n, device=DEVICE)[None], table, 70, *got)
    assert all(have.equal(part) for have, part in zip(got, whole, strict=True)) and blocks


def store(columns=2):
    """An empty one that the device reads by itself, or the interpreter in its place; its table has to grow soon."""
    device = torch.device(DEVICE, 0) if GPU else torch.device("cpu")
    return HostStore(
        HostMemoryBudget(), device, table=HostBlockTable(torch.empty(3, columns, dtype=torch.int64, device=device))
    )


def same(host, pieces, index):
    whole = [torch.cat(part, 1) for part in zip(*pieces, strict=True)]
    rows = index.expand(len(whole[0]), -1)[..., None]
    return all(
        got.equal(part.gather(1, rows.expand(-1, -1, part.shape[-1])))
        for got, part in zip(host.gather(index), whole, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_stores_that_went_different_ways(kind):
    torch.manual_seed(0)
    pieces = [[drawn(2, n, d, kind=kind) for d in (24, 40)] for n in (3, 1, 9, 5, 2, 7)]
    hosts = [store()]
    for piece in pieces[:3]:
        hosts.append(hosts[-1].put(*piece))
    other = hosts[2].put(*pieces[4])  # the table knows another slab in this place
    again = hosts[2].put(*pieces[5]).put(*pieces[0])
    last = hosts[3].put(*pieces[3])
    told = {last: [0, 1, 2, 3], other: [0, 1, 4], again: [0, 1, 5, 0], hosts[3]: [0, 1, 2], hosts[1]: [0]}
    for host, numbers in told.items():
        mine, n = [pieces[i] for i in numbers], host.tokens
        assert host.table and n == sum(piece[0].shape[1] for piece in mine)
        for index in (
            torch.arange(n)[None],
            torch.stack([torch.arange(n), torch.arange(n).flip(0)]),
            torch.tensor([[n - 1]]),
        ):
            assert same(host, mine, index.to(DEVICE))
        assert all(a.equal(torch.cat(b, 1)) for a, b in zip(host.gather_all(), zip(*mine, strict=True), strict=True))
    blocks = last.blocks
    assert all(block.keys.is_pinned() == GPU and block.keys.data_ptr() % 64 == 0 for block in blocks)
    spent = last.host_budget.used_bytes
    assert spent == sum(
        t.nbytes for host in (last, other, again) for block in {*host.blocks} - {*hosts[2].blocks} for t in block.pair
    ) + (hosts[2].nbytes)
    del other, told, host
    assert last.host_budget.used_bytes == spent - sum(t.nbytes for t in pieces[4])


def test_a_cache_that_reads_itself_says_what_another_does(monkeypatch):
    """All of it: windows, forks, pieces, tokens written one by one."""
    ids = torch.randperm(64, generator=torch.Generator().manual_seed(0))[None].repeat(1, 3).to(DEVICE)
    model = make_llama(vocab_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2).to(DEVICE)
    caches = [kvkeep.Cache(model, "actqkv", 64, window=16, chunk=8) for _ in range(2)]
    monkeypatch.setattr(caches[0].backend, "_empty", with_store(caches[0].backend))
    if GPU:
        monkeypatch.setattr(HostBlockTable, "new", lambda device: None)  # the other one fetches by a processor
    for first, last in ((0, 128), (128, 150), *((t, t + 1) for t in range(150, 156))):
        got, want = (model(ids[:, first:last], past_key_values=each).logits for each in caches)
        assert got.equal(want)
    assert caches[0].kept(0) == caches[1].kept(0)
    hosts = [cache.backend.states[0][0].host for cache in caches]
    assert hosts[0].table and not hosts[1].table and hosts[0].tokens == hosts[1].tokens > 64
    twins = [cache.fork() for cache in caches]
    for each in (caches, twins):
        got, want = (model(ids[:, :40] if each is twins else ids[:, 90:], past_key_values=c).logits for c in each)
        assert got.equal(want)


def with_store(retrieval):
    def empty(new):
        state = type(retrieval)._empty(retrieval, new)
        state.host.table = store().table
        return state

    return empty


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads, n, dim, pairs", [(1, 1, 2, 1), (3, 20, 24, 5), (2, 9, 128, 64), (2, 33, 80, 16)])
def test_angles(heads, n, dim, pairs, interleaved, own, wide, kind):
    torch.manual_seed(n)
    angle = 100 * torch.rand(*([heads] if own else []), n, pairs, device=DEVICE)
    vectors = drawn(n + 3, heads, dim, kind=kind).transpose(0, 1)[:, 1 : n + 1]
    how = vectors, angle.cos(), angle.sin(), interleaved, torch.float32 if wide else kind
    got, want = layer_ops.apply_angles(*how), elementwise.apply_angles(*how)
    bound = 1e-6 if wide or kind == torch.float32 else 2 * torch.finfo(kind).eps
    assert got.dtype == want.dtype and (got.float() - want.float()).abs().max() <= bound * vectors.float().abs().max()
    assert got[..., 2 * pairs :].equal(want[..., 2 * pairs :])
