"""Copies between the host and a device that the host does not wait for."""

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


class Download:
    """Numbers on their way to the host; called, it waits for them."""

    def __init__(self, values: Tensor) -> None:
        self.copied: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self.host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            self.copied = torch.cuda.current_stream(values.device).record_event()
        else:
            self.host = values.clone()

    @property
    def is_ready(self) -> bool:
        """Whether they have come."""
        return self.copied is None or self.copied.query()

    def __call__(self) -> list[Any]:
        if self.copied:
            self.copied.synchronize()
        return self.host.tolist()
