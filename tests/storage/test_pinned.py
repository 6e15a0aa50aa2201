"""Pinned host memory is handed out once, and lives as long as somebody holds a part of it."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from draws import CPU, many

from kvkeep.storage.offload import pinned
from kvkeep.storage.offload.pinned import Arena


@pytest.mark.core
@many(20)
def test_an_arena_hands_out_each_byte_once(seed):
    rng, arena, held = np.random.default_rng(seed), Arena(CPU), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "SMALLEST", 1024)
        patch.setattr(pinned, "LARGEST", 4096)
        for number in range(40):
            kind = [torch.float32, torch.bfloat16, torch.float64][number % 3]
            with torch.inference_mode(bool(number % 2)):  # a block outlives the pass that asked for it
                room = arena.allocate(tuple(rng.integers(1, 9, 3).tolist()), kind)
                held.append((room.copy_(torch.full_like(room, number)), number))
    assert all((room == number).all() and room.is_contiguous() for room, number in held)
    blocks = {room.untyped_storage().data_ptr(): room.untyped_storage().nbytes() for room, _ in held}
    assert arena.allocated == sum(blocks.values()) and all(1024 <= size <= 4096 for size in blocks.values())
    assert (
        sum(room.nbytes for room, _ in held) <= arena.allocated < 2 * len(held) * 512 + sum(r.nbytes for r, _ in held)
    )


def test_an_arena_takes_no_more_than_its_limit():
    """What will ever be asked for fits, so nothing is prepared beyond it."""
    arena = Arena(CPU, limit=5000)
    arena.allocate((100,), torch.uint8)
    assert arena.allocated == 20 * pinned.ALIGNED and arena.prefetched is None


class Driver:
    """CUDA's, as far as pinning goes."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, refuses: bool = False):
        self.refuses, self.pinned, self.waits = refuses, {}, 0

    def cudaHostRegister(self, address, size, _):
        assert address % pinned.PAGE == 0
        self.pinned |= {} if self.refuses else {address: size}
        return int(self.refuses)

    def cudaHostUnregister(self, address):
        assert self.waits == 1  # for what the GPU still does with it
        del self.pinned[address]


@pytest.mark.core
def test_pinned_memory_is_pinned_as_long_as_somebody_holds_a_part_of_it(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: setattr(driver, "waits", driver.waits + 1))
    block = pinned.allocate_pinned(2**20, torch.device("cuda"))
    part = block.view(torch.float32).narrow(0, 512, 8).fill_(3)
    assert driver.pinned == {block.data_ptr(): 2**20} and len(block) == 2**20 and not block[:: pinned.PAGE].any()
    del block
    assert driver.pinned and (part == 3).all()
    del part
    assert not driver.pinned and driver.waits == 1


@pytest.mark.core
def test_where_the_driver_will_not_pin_what_is_there_torch_is_asked(monkeypatch):
    asked, empty = [], torch.empty
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(refuses=True))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: asked.append(pin_memory) or empty(size))
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=RuntimeError("told of the refusal")))
    assert len(pinned.allocate_pinned(4096, torch.device("cuda"))) == 4096 and asked == [True]


def test_a_block_that_could_not_be_made_ahead_is_done_without(monkeypatch):
    sizes, make = [], pinned.allocate_pinned

    def full_for_once(size, device):
        sizes.append(size)
        if len(sizes) == 2:
            raise MemoryError("no room for the block ahead")
        return make(size, device)

    monkeypatch.setattr(pinned, "allocate_pinned", full_for_once)
    arena = pinned.Arena(CPU)
    arena.allocate((pinned.SMALLEST,), torch.uint8)
    assert arena.allocate((1000,), torch.uint8).shape == (1000,)
    assert sizes[2] == 1024, "what was asked for, no more"
    assert arena.allocate((5, 1000), torch.float32).shape == (5, 1000), "and then as before"
