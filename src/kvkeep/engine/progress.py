"""How far a prompt is read, for whoever waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a prompt is read."""

    done: int
    total: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def left(self) -> float:
        """Seconds, if it goes on like this."""
        return (self.total - self.done) / self.rate if self.rate else 0.0
