"""Copies from the host to a device that the host does not wait for."""

from __future__ import annotations

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
