"""Host memory that a GPU reads and writes by itself: large pinned blocks, and a table of what lies where in them."""

from __future__ import annotations

import time
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import prod

import numpy as np
import torch
from torch import Tensor

from kvkeep.kernels.dispatch import kernel, where
from kvkeep.storage.offload.device_lru import Pair

SMALLEST, LARGEST = 2**24, 2**30  # bytes of a block: as much as all before it together, within these
ALIGNED = 256  # bytes
PAGE = 4096


class Arena:
    """Memory handed out from the front of large blocks, each freed with the last tensor in it.

    Pinning a block takes long, so while one is being filled, the next is made.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        """limit: bytes that will ever be taken, about"""
        self.device, self.limit = device, limit
        self.block: Tensor | None = None
        self.typed: Tensor | None = None  # the same, as what was asked for last
        self.used = 0  # bytes of the block
        self.made = 0  # bytes of all blocks so far
        self.waited = 0.0  # seconds
        self.worker = ThreadPoolExecutor(1, "kvkeep-pin")
        self.coming: Future[Tensor] | None = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for a tensor: a view of a block."""
        size = prod(shape) * dtype.itemsize
        if self.block is None or self.used + size > self.block.shape[0]:
            self._next(size)
        if self.typed is None or self.typed.dtype != dtype:
            self.typed = self.block.view(dtype)
        room = self.typed.narrow(0, self.used // dtype.itemsize, size // dtype.itemsize).view(shape)
        self.used += _aligned(size)
        return room

    def _next(self, size: int) -> None:
        began = time.perf_counter()
        coming, self.coming = self.coming, None
        block = self._made(coming, size)
        self.block, self.typed, self.used, self.made = block, None, 0, self.made + len(block)
        ahead = self.limit is None or self.made < self.limit
        self.coming = self.worker.submit(_pinned, self._size(0), self.device) if ahead else None
        self.waited += time.perf_counter() - began

    def _made(self, coming: Future[Tensor] | None, size: int) -> Tensor:
        """A block for at least so many bytes; for just as many where there is no memory for more."""
        with suppress(MemoryError, RuntimeError):
            block = coming.result() if coming else None
            return block if block is not None and len(block) >= size else _pinned(self._size(size), self.device)
        return _pinned(_aligned(max(1, size)), self.device)

    def _size(self, least: int) -> int:
        usual = max(SMALLEST, min(self.made, LARGEST))
        return _aligned(max(1, least, usual if self.limit is None else min(usual, self.limit)))


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _pinned(size: int, device: torch.device) -> Tensor:
    """Memory that a GPU can reach, until the last tensor in it is gone.

    The driver is busy while it pins, and nobody can give the GPU work meanwhile: pages are there before it is asked.
    """
    with torch.inference_mode(False):  # a block outlives the pass that asked for it
        if device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        memory = np.empty(size + 2 * PAGE, np.uint8)
        first = -memory.ctypes.data % PAGE  # pages of its own
        block = torch.from_numpy(memory[first : first + size])  # holds it
        block[::PAGE].zero_()
        driver = torch.cuda.cudart()
        with torch.cuda.device(device):
            if driver.cudaHostRegister(block.data_ptr(), size, 0) != driver.cudaError.success:
                with suppress(RuntimeError):  # whoever launches next is told of the refusal
                    torch.zeros(1, device=device)
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        weakref.finalize(memory, _unpin, block.data_ptr(), device).atexit = False
        return block


def _unpin(address: int, device: torch.device) -> None:
    """Once the GPU is done with it."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)


class Table:
    """Where slabs lie, known on the device. Stores that share their first slabs share it, until they differ."""

    broken = False  # a kernel could not be had: reported once, then done without

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.filled = rows, 0

    @classmethod
    def new(cls, device: torch.device) -> Table | None:
        """None where nothing but a processor can read host memory."""
        if device.type != "cuda" or cls.broken:
            return None
        return cls(torch.empty(3, 64, dtype=torch.int64, device=device))

    def put(self, keys: Tensor, values: Tensor, home: Pair, slot: int, end: int) -> Table | None:
        """Write a slab home, as number `slot`, and note it. -> the table that knows it; None where that failed"""
        if self.broken:
            return None
        table = self if self.filled == slot < self.rows.shape[1] else self._copy(slot)
        try:
            with where(keys.device):
                kernel("host_gather", "put")(keys, values, home, table.rows, slot, end)
        except Exception as error:  # whatever a compiler, a driver or a missing package raises
            return self._fail(error)
        table.filled = slot + 1
        return table

    def fetch(self, index: Tensor, slabs: int, like: Pair, front: Pair | None) -> Pair | None:
        """Tokens by number, behind those in front. Shapes as in `Host.fetch`; None where that failed"""
        if self.broken:
            return None
        shape = like[0].shape[0], index.shape[1] + (front[0].shape[1] if front else 0)
        pair = tuple(torch.empty(*shape, t.shape[-1], dtype=t.dtype, device=index.device) for t in like)
        try:
            with where(index.device):
                kernel("host_gather", "gather")(index, self.rows, slabs, *pair, front)
        except Exception as error:
            return self._fail(error)
        return pair

    def _copy(self, slots: int) -> Table:
        """The first so many columns, with room for as many more."""
        rows = self.rows.new_empty(3, max(64, 2 * slots))
        rows[:, :slots] = self.rows[:, :slots]
        return Table(rows)

    def _fail(self, error: Exception) -> None:
        Table.broken = True
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"the kernel 'gather' cannot be used ({why}); torch does its work.", stacklevel=4)
