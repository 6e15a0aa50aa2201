"""Copies between the host and a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device) -> Tensor:
    """Copy a tensor, or numbers, to a device. Copying what is not pinned would wait for all that runs there."""
    host = torch.as_tensor(values)
    if device.type != "cuda" or host.device.type != "cpu":
        return host.to(device)
    pinned = host.contiguous().pin_memory()  # an expanded tensor cannot be pinned
    return pinned.to(device, non_blocking=True)


def download(values: Tensor) -> Callable[[], list[Any]]:
    """Copy numbers to the host. -> a function that waits for them"""
    if values.device.type != "cuda":
        numbers = values.tolist()
        return lambda: numbers
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    copied = torch.cuda.current_stream(values.device).record_event()

    def wait() -> list[Any]:
        copied.synchronize()
        return host.tolist()

    return wait
