"""Host memory that a GPU reads and writes itself: large pinned segments, and a device table of the blocks in them."""

from __future__ import annotations

import time
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.kernels.dispatch import Kernel, gather_blocks, put_block
from kvkeep.storage.offload.device_lru import Pair

SMALLEST, LARGEST = 2**24, 2**30  # bytes of a segment: as much as all before it together, within these
ALIGNED = 256  # bytes
PAGE = 4096


class Arena:
    """Bump allocator over large segments, each freed with the last tensor in it.

    Pinning a segment takes long, so a thread prepares the next one while the current one is filled.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        """limit: bytes that will ever be allocated, about"""
        self.device, self.limit = device, limit
        self.segment = torch.empty(0, dtype=torch.uint8)
        self.typed = self.segment  # viewed as the dtype allocated last
        self.used = 0  # bytes of the segment
        self.allocated = 0  # bytes of all segments so far
        self.wait_seconds = 0.0
        self.worker = ThreadPoolExecutor(1, "kvkeep-pin")
        self.prefetched: Future[Tensor] | None = None

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor: a view of a segment."""
        size = prod(shape) * dtype.itemsize
        if self.used + size > self.segment.shape[0]:
            self._next_segment(size)
        if self.typed.dtype != dtype:
            self.typed = self.segment.view(dtype)
        tensor = self.typed.narrow(0, self.used // dtype.itemsize, size // dtype.itemsize).view(shape)
        self.used += _aligned(size)
        return tensor

    def _next_segment(self, size: int) -> None:
        began = time.perf_counter()
        prefetched, self.prefetched = self.prefetched, None
        segment = self._make_segment(prefetched, size)
        self.segment, self.typed, self.used, self.allocated = segment, segment, 0, self.allocated + len(segment)
        ahead = self.limit is None or self.allocated < self.limit
        self.prefetched = self.worker.submit(allocate_pinned, self._size(0), self.device) if ahead else None
        self.wait_seconds += time.perf_counter() - began

    def _make_segment(self, prefetched: Future[Tensor] | None, size: int) -> Tensor:
        """A segment of at least `size` bytes; of exactly that many where there is no memory for more."""
        with suppress(MemoryError, RuntimeError):
            segment = prefetched.result() if prefetched else None
            if segment is not None and len(segment) >= size:
                return segment
            return allocate_pinned(self._size(size), self.device)
        return allocate_pinned(_aligned(max(1, size)), self.device)

    def _size(self, least: int) -> int:
        default = max(SMALLEST, min(self.allocated, LARGEST))
        return _aligned(max(1, least, default if self.limit is None else min(default, self.limit)))


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def allocate_pinned(size: int, device: torch.device) -> Tensor:
    """Memory that a GPU can reach, until the last tensor in it is gone.

    The driver accepts no other work while it pins, so the pages are touched before it is called.
    """
    with torch.inference_mode(False):  # a segment outlives the forward pass that asked for it
        if device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        memory = np.empty(size + 2 * PAGE, np.uint8)
        first = -memory.ctypes.data % PAGE  # pages of its own
        segment = torch.from_numpy(memory[first : first + size])  # holds `memory`
        segment[::PAGE].zero_()
        driver = torch.cuda.cudart()
        with torch.cuda.device(device):
            if driver.cudaHostRegister(segment.data_ptr(), size, 0) != driver.cudaError.success:
                with suppress(RuntimeError):  # clear the error, which the next launch would raise
                    torch.zeros(1, device=device)
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        weakref.finalize(memory, _unpin, segment.data_ptr(), device).atexit = False
        return segment


def _unpin(address: int, device: torch.device) -> None:
    """Once the GPU is done with it."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)


class HostBlockTable:
    """Addresses of the host blocks, on the device. Stores that share their first blocks share it until they differ."""

    broken = False  # the kernel failed: reported once, torch does its work from then on

    def __init__(self, entries: Tensor) -> None:
        self.entries, self.filled = entries, 0  # [3, capacity], see kernels/triton/host_gather.py

    @classmethod
    def new(cls, device: torch.device) -> HostBlockTable | None:
        """None where only the CPU can read host memory."""
        if device.type != "cuda" or cls.broken:
            return None
        return cls(torch.empty(3, 64, dtype=torch.int64, device=device))

    def put(self, keys: Tensor, values: Tensor, block: Pair, slot: int, end: int) -> HostBlockTable | None:
        """Copy keys and values to a host block and enter it at `slot`. -> the table that has it; None on failure"""
        if self.broken:
            return None
        table = self if self.filled == slot < self.entries.shape[1] else self._copy(slot)
        if not self._run(put_block, keys, values, block, table.entries, slot, end):
            return None
        table.filled = slot + 1
        return table

    def gather(self, index: Tensor, blocks: int, like: Pair, prefix: Pair | None) -> Pair | None:
        """Tokens by number, behind the prefix. Shapes as in `HostStore.gather`; None on failure"""
        if self.broken:
            return None
        shape = like[0].shape[0], index.shape[1] + (prefix[0].shape[1] if prefix else 0)
        pair = Pair(*(torch.empty(*shape, t.shape[-1], dtype=t.dtype, device=index.device) for t in like))
        return pair if self._run(gather_blocks, index, self.entries, blocks, *pair, prefix) else None

    def _copy(self, slots: int) -> HostBlockTable:
        """The first `slots` columns, with room for as many more."""
        entries = self.entries.new_empty(3, max(64, 2 * slots))
        entries[:, :slots] = self.entries[:, :slots]
        return HostBlockTable(entries)

    def _run(self, kernel: Kernel, *arguments: Any) -> bool:
        """Call a kernel. -> whether it worked"""
        try:
            kernel(*arguments)
        except Exception as error:  # whatever a compiler, a driver or a missing package raises
            HostBlockTable.broken = True
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the kernel 'gather' cannot be used ({why}); torch does its work.", stacklevel=4)
            return False
        return True
