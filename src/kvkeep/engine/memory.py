"""How much memory sequences take, and how much there is."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvkeep.compress.method import STORAGE
from kvkeep.model.hf_cache import key_shape
from kvkeep.storage.pool import QuantizedBuffer, RaggedBuffer, new_buffer

MEMORY_FRACTION = 0.8  # of free memory, for keys and values; forward passes need the rest


def row_bytes(model: Any, tokens: int, storage: str | None = None) -> int:
    """Bytes of a sequence of so many tokens per key head in a pool."""
    kind, (kv_heads, dim) = QuantizedBuffer if STORAGE[storage] else RaggedBuffer, key_shape(model)
    buffer = new_buffer(1, kv_heads, kv_heads * kind.slots(tokens), dim, STORAGE[storage], model.dtype, "meta")
    return buffer.nbytes * model.config.get_text_config(decoder=True).num_hidden_layers


def free_host_bytes() -> int | None:
    """Available host memory; None where it is unknown."""
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


def slot_bytes(model: Any, storage: str | None) -> int:
    """Bytes of one token of one key head in all layers of a pool, a row's quantization tail shared out."""
    return -(-row_bytes(model, 1024, storage) // (1024 * key_shape(model)[0]))
