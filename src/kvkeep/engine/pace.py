"""How much of the prompts is prefilled between two decode steps, so that answers get their tokens as often as asked."""

from __future__ import annotations

import time
from dataclasses import dataclass

STEP_TOKENS = {"cuda": 2048, "cpu": 256}  # between two decode steps, until something was measured
TARGET_S = {"cuda": 0.08, "cpu": None}  # seconds between two decode steps, where nobody asks for others
LEARNED = 0.3  # how much of what a pass shows counts
SOON = 0.6  # of the time between two decode steps: after so much of it the next one may begin
FULL = 0.6  # a pass with fewer of these tokens says little about more of them


@dataclass
class Pace:
    """Tokens that are prefilled between two decode steps, learned from the time that forward passes take."""

    tokens: float
    target: float | None  # seconds between two decode steps; None: nothing is learned
    began: float | None = None  # when the last pass began; None: no pass followed it at once
    cost: float = 0.0  # of that pass, in tokens that attend to nothing
    steps: int = 0  # decode steps in that pass, and before it
    stepped: float = 0.0  # when the last decode step began

    @classmethod
    def of(cls, device: str, target: float | None, learns: bool = True) -> Pace:
        """The pace on a kind of device. target: None for the usual one"""
        target = TARGET_S[device] if target is None else target
        return cls(STEP_TOKENS[device], target if learns else None)

    def begin_step(self) -> None:
        """A decode step begins."""
        self.stepped = time.perf_counter()

    @property
    def is_due(self) -> bool:
        """Whether the next decode step should begin."""
        return self.target is None or time.perf_counter() - self.stepped > SOON * self.target

    def begin_pass(self, cost: float) -> None:
        """Learn from the pass before, which ends where this one begins: the device works on one after the other."""
        now = time.perf_counter()
        if self.began is not None and self.target and self.steps:
            seconds, tokens = (now - self.began) / self.steps, self.cost / self.steps
            if tokens > FULL * self.tokens or seconds > self.target:
                self.tokens += LEARNED * (tokens * self.target / seconds - self.tokens)
        self.began, self.cost, self.steps = now, cost, 0

    def pause(self) -> None:
        """No pass follows the last one: when that ended is not known."""
        self.began = None

    def layers_between(self, layers: int) -> int:
        """How many of the layers of the pass that began are between two decode steps."""
        return max(1, int(layers * self.tokens / self.cost))
