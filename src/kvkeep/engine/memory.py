"""How much memory sequences take, and how much there is."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvkeep.compress.method import STORAGE
from kvkeep.model.hf_cache import key_shape
from kvkeep.storage.ragged import LayerKind
from kvkeep.storage.rows import new_rows, span_size

MEMORY_FRACTION = 0.8  # of free memory, for keys and values; forward passes need the rest


@dataclass
class MemoryCap:
    """The most bytes of keys and values an engine holds at a time: pools, caches of their own, stored prefixes."""

    total: int
    held: Callable[[], int]
    free_some: Callable[[], bool]  # of what nobody needs now. -> whether there was something
    largest_prompt: int = 0  # bytes so far: a pool that grows for requests to come leaves so many

    @property
    def left(self) -> int:
        return max(0, self.total - self.held())

    def make_room(self, size: int) -> bool:
        """Free what nobody needs. -> whether so many bytes are left"""
        while self.left < size:
            if not self.free_some():
                return False
        return True


def row_bytes(model: Any, tokens: int, storage: str | None = None) -> int:
    """Bytes of a sequence of so many tokens per KV head in a pool."""
    kv_heads, dim = key_shape(model)
    kind, bits = LayerKind(kv_heads, dim, dim, model.dtype, torch.device("meta")), STORAGE[storage]
    slots = kv_heads * span_size(tokens, bits)
    return new_rows(kind, 1, slots, bits).nbytes * model.config.get_text_config(decoder=True).num_hidden_layers


def free_host_bytes() -> int | None:
    """Available host memory, of the machine or of the container; None where it is unknown."""
    found = [free for free in (_free_of_machine(), _free_of_container()) if free is not None]
    return min(found) if found else None


def half_of_host() -> int:
    """Half of the host memory that is free."""
    free = free_host_bytes()
    return sys.maxsize if free is None else max(1, free // 2)


def _free_of_container() -> int | None:
    """What a limit of the control group leaves; None: there is none."""
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # "max" is no number
        return max(0, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return None


def _free_of_machine() -> int | None:
    with suppress(OSError):  # only Linux has this file
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, size = line.partition(":")
            if name == "MemAvailable":
                return int(size.split()[0]) * 1024
    return None


def free_device_bytes(device: torch.device) -> int | None:
    """Available memory of a GPU; None for other devices."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def tail_bytes(model: Any, storage: str | None) -> int:
    """Bytes of a row of a pool that has no slots: tokens that are not quantized yet, and a slot where nobody reads."""
    return row_bytes(model, 0) if storage is None else 2 * row_bytes(model, 32, storage) - row_bytes(model, 64, storage)


def slot_bytes(model: Any, storage: str | None) -> int:
    """Bytes of one token of one KV head in all layers of a pool, a row's quantization tail shared out."""
    return -(-row_bytes(model, 1024, storage) // (1024 * key_shape(model)[0]))


def trim() -> None:
    """Return free memory to the system: kept tokens between freed tensors leave the allocator fragmented.

    It takes a few milliseconds, and does nothing where the C library has no such call (it is glibc's).
    """
    if call := _malloc_trim():
        call(0)


@cache
def _malloc_trim():
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
