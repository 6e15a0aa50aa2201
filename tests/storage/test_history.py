"""The whole of a sequence on the host: what was appended, piece by piece, is what is read."""

import gc

import pytest
import torch

from kvkeep.storage import history
from kvkeep.storage.history import BlockFormat, History, HostPool

CPU = torch.device("cpu")
SHAPES = {0: (2, 6, 4), 3: (1, 8, 8)}  # of layers: KV heads, numbers of a key and of a value


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(history, "BLOCK", 32)


def tokens(count, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return {
        i: tuple(torch.randn(heads, count, dim, generator=draw, dtype=torch.float64).to(dtype) for dim in dims)
        for i, (heads, *dims) in SHAPES.items()
    }


def append(known, layers, start, end):
    for i, (keys, values) in layers.items():
        known.append(i, keys[:, start:end], values[:, start:end])
    known.commit()


def check(known, layers, count):
    assert known.tokens == count
    for i, wanted in layers.items():
        for got, want in zip(known.read(i), wanted, strict=True):
            assert got.equal(want[:, :count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_was_appended_in_pieces_of_any_size_is_read(dtype):
    layers, draw = tokens(500, dtype=dtype), torch.Generator().manual_seed(1)
    for _ in range(10):
        known, end = History(HostPool(CPU)), 0
        assert known.read(0) is None
        while end < 500:
            start, end = end, min(500, end + int(torch.randint(1, 150, (1,), generator=draw)))
            append(known, layers, start, end)
            check(known, layers, end)
            assert len(known.blocks) == end // 32


def test_those_that_go_on_after_one_beginning_share_its_blocks():
    layers, other = tokens(200), tokens(200, seed=7)
    pool = HostPool(CPU)
    first = History(pool)
    append(first, layers, 0, 110)
    second, cut = first.until(110), first.until(109)
    append(first, layers, 110, 200)
    append(second, other, 110, 130)
    check(first, layers, 200)
    check(second, {i: tuple(torch.cat([a[:, :110], b[:, 110:]], 1) for a, b in zip(layers[i], other[i], strict=True))
                   for i in layers}, 130)  # fmt: skip
    check(cut, layers, 96)
    assert first.blocks[:3] == second.blocks[:3] == cut.blocks and pool.in_use == 6 + 1


def test_a_pass_that_is_cut_short_leaves_nothing():
    layers, pool = tokens(100), HostPool(CPU)
    known = History(pool)
    append(known, layers, 0, 40)
    known.append(0, *(part[:, 40:90] for part in layers[0]))  # and no other layer
    check(known, layers, 40)
    known.rollback()
    assert pool.in_use == 1 + len(known.spare) == 2  # what was taken for it is for the next try
    append(known, layers, 40, 100)
    check(known, layers, 100)
    assert pool.in_use == 3


def test_memory_is_given_back_and_used_again(monkeypatch):
    monkeypatch.setattr(history, "SLAB_BLOCKS", 4)
    layers, pool = tokens(32 * 10), HostPool(CPU)
    one, two = History(pool), History(pool)
    append(one, layers, 0, 320)
    append(two, layers, 0, 96)
    assert pool.used_bytes == one.nbytes + two.nbytes == 13 * pool.block_bytes
    assert pool.block_bytes == 32 * 4 * (2 * 10 + 16)
    del one
    gc.collect()
    assert pool.used_bytes == two.nbytes and len(pool.slabs) == 2  # those that two's blocks lie in
    three = History(pool)
    append(three, layers, 0, 32 * 5)
    assert len(pool.slabs) == 2
    check(two, layers, 96)
    check(three, layers, 160)
    del two, three
    gc.collect()
    assert pool.in_use == 0 and not pool.slabs


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_as_far_off_as_they_must_be(bits):
    """Oracle: every group of 32 tokens by itself; keys per channel, values per token."""
    layers = tokens(96, dtype=torch.float64)
    known = History(HostPool(CPU, bits))
    append(known, layers, 0, 96)
    for i, (keys, values) in layers.items():
        found_keys, found_values = known.read(i)
        for h in range(len(keys)):
            for start in range(0, 96, 32):
                for c in range(keys.shape[2]):
                    check_group(keys[h, start : start + 32, c], found_keys[h, start : start + 32, c], bits)
            for t in range(96):
                check_group(values[h, t], found_values[h, t], bits)
    exact = sum(keys.nbytes + values.nbytes for keys, values in tokens(96, dtype=torch.float32).values())
    assert known.nbytes < exact


def check_group(wanted, found, bits):
    wanted = wanted.tolist()
    least, step = min(wanted), (max(wanted) - min(wanted)) / (2**bits - 1)
    for number, got in zip(wanted, found.tolist(), strict=True):
        code = int((number - least) / step + 0.5)
        assert abs(least + code * step - got) < 1e-5 and abs(number - got) < step / 2 + 1e-5


def test_a_block_takes_the_bytes_that_its_format_says():
    for bits in (None, 8, 4):
        keys, values = torch.randn(2, 64, 6), torch.randn(2, 64, 4)
        form = BlockFormat.of(keys, values, bits)
        payload = form.encode(keys, values)
        assert payload.shape == (2, form.nbytes) and payload.dtype == torch.uint8
        targets = form.empty(64, CPU)
        assert [part.shape for part in targets] == [keys.shape, values.shape]
        form.decode(payload, targets)
        for found, part in zip(targets, (keys, values), strict=True):
            assert (found - part).abs().max() < (0.5 if bits else 1e-9)
