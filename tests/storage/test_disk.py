"""The store on disk: what is spilled comes back, and files go with who wrote them."""

import errno
import gc
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import make_llama
from draws import CPU, fill, same, some

import kvkeep
from kvkeep.errors import BadParameter, StoreFull
from kvkeep.storage.offload import disk as spilling
from kvkeep.storage.offload.disk import DiskStore
from kvkeep.storage.offload.host import HostMemoryBudget, HostStore


@pytest.fixture
def spill(tmp_path):
    opened = DiskStore(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("limit", [0, 100, 400])
@pytest.mark.parametrize("seed", range(17))
def test_what_is_spilled_comes_back(spill, limit, seed):
    rng = np.random.default_rng(seed)
    host, whole = fill(rng, HostMemoryBudget(limit, spill))
    heads, n = whole[0].shape[:2]
    assert host.host_budget.used_bytes <= limit and host.nbytes == sum(t.nbytes for t in whole)
    files = [path for path in spill.folder.iterdir() if path.suffix == ".safetensors"]
    assert (host.host_budget.used_bytes < host.nbytes) == bool(files) and (limit or len(files) == len(host.blocks))
    for rows in (1, heads):
        index = some(rng, rows, n, int(rng.integers(1, n + 1)))
        assert same(host.gather(index), whole, index)
    assert all(a.equal(b) for a, b in zip(host.gather_all(), whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_spilling_keeps_every_bit(spill, dtype):
    wide = torch.randn(2, 5, 9).to(dtype)
    host = HostStore(HostMemoryBudget(0, spill), CPU).put(wide[..., :4].transpose(0, 1), wide[..., 4:].transpose(0, 1))
    assert all(a.equal(b.transpose(0, 1)) for a, b in zip(host.gather_all(), wide.split([4, 5], -1), strict=True))


def test_the_folder_goes_with_the_store(tmp_path):
    first, second = DiskStore(tmp_path), DiskStore(tmp_path)
    assert first.folder != second.folder and first.folder.is_dir()  # one that is alive is not swept
    fill(np.random.default_rng(0), HostMemoryBudget(0, first))
    first.close()
    first.close()
    assert list(tmp_path.iterdir()) == [second.folder]
    del second
    assert list(tmp_path.iterdir()) == []


STAYS = """
import sys, time, torch
from kvkeep.storage.offload.disk import DiskStore
spill = DiskStore(sys.argv[1])
spill.write(torch.ones(1, 2, 3), torch.ones(1, 2, 3))
print(spill.folder, flush=True)
time.sleep(60)
"""


def test_leftovers_of_a_dead_process_are_swept(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", STAYS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        folder = tmp_path / other.stdout.readline().strip()
        DiskStore(tmp_path).close()
        assert sorted(path.name for path in folder.iterdir()) == ["0.safetensors", "alive"]
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()
    assert folder.is_dir()
    mine = DiskStore(tmp_path)
    assert list(tmp_path.iterdir()) == [mine.folder]
    mine.close()


def test_a_full_disk_loses_nothing(spill, monkeypatch):
    rng = np.random.default_rng(0)
    host, whole = fill(rng, HostMemoryBudget(100, spill))
    files, size = sorted(spill.folder.iterdir()), host.host_budget.used_bytes

    def full(tensors, path):
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(spilling, "save_file", full)
        with pytest.raises(StoreFull, match=r"No space left.*Nothing was lost"):
            host.put(*whole)
    index = some(rng, len(whole[0]), host.tokens, host.tokens // 2)
    assert same(host.gather(index), whole, index)
    assert sorted(spill.folder.iterdir()) == files and host.host_budget.used_bytes == size
    assert host.put(*whole).tokens == 2 * host.tokens


def test_a_folder_that_cannot_be(tmp_path):
    with pytest.raises(BadParameter, match="is not a folder; make it first"):
        DiskStore(tmp_path / "nowhere")
    (tmp_path / "kvkeep-notes.txt").write_text("a file, not a folder")
    DiskStore(tmp_path).close()
    assert (tmp_path / "kvkeep-notes.txt").exists()


def test_folders_of_others_are_left_alone(tmp_path):
    notes = tmp_path / "kvkeep-experiments" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("not ours")
    DiskStore(tmp_path).close()
    assert notes.exists()


def test_folders_that_may_not_be_opened_are_left_alone(tmp_path, monkeypatch):
    (tmp_path / "kvkeep-of-another").mkdir()
    usual = os.open

    def guarded(path, *args, **options):
        if "of-another" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return usual(path, *args, **options)

    monkeypatch.setattr(spilling.os, "open", guarded)
    DiskStore(tmp_path).close()
    assert (tmp_path / "kvkeep-of-another").exists()


def test_a_file_goes_with_its_slab(tmp_path):
    model = make_llama()
    cache = kvkeep.Cache(model, "infllm", 64, host_limit=1000, disk=tmp_path, window=32)
    written = []
    for _ in range(3):
        model(torch.arange(300)[None] % 128, past_key_values=cache)
        written.append(len(list(tmp_path.rglob("*.safetensors"))))
        cache.reset()
        gc.collect()
        assert not list(tmp_path.rglob("*.safetensors"))
    assert written[0] > 0 and len(set(written)) == 1
