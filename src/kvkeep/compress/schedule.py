"""When tokens are evicted: after every prefill and, optionally, while decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvkeep.arguments import Checked, Positive, check_value


@dataclass(frozen=True)
class Schedule(Checked):
    """While decoding, evict as soon as a head holds budget + every tokens; None: never.

    1 keeps the cache at its budget at every step. A larger number is a buffer (ProtoKV, appendix O): the cache grows
    to budget + every - 1, and then the queries decoded meanwhile decide.
    """

    every: Positive | None = None

    def evict_now(self, held: int, budget: int) -> bool:
        return self.every is not None and held >= budget + self.every


NAMES = {"prompt": Schedule(), "step": Schedule(1), "buffer": Schedule(128)}


def as_schedule(value: str | int | Schedule) -> Schedule:
    """One of "prompt", "step", "buffer" (128 tokens), a number of tokens, or a Schedule."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, str) and value in NAMES:
        return NAMES[value]
    check_value("schedule", value, Literal["prompt", "step", "buffer"] | Positive)
    return Schedule(int(value))
