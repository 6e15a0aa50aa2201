"""Progress of a prefill, and a clock that waits for the device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Progress:
    """How far a prompt is prefilled, in tokens."""

    done: int
    total: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def left(self) -> float:
        """Seconds left at this rate."""
        return (self.total - self.done) / self.rate if self.rate else 0.0


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
