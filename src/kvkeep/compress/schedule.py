"""When tokens are evicted: after every prefill and, optionally, while decoding."""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.errors import BadParameter


@dataclass(frozen=True)
class Schedule:
    """While decoding, evict as soon as a head holds budget + every tokens; None: never.

    1 keeps the cache at its budget at every step. A larger number is a buffer (ProtoKV, appendix O): the cache grows
    to budget + every - 1, and then the queries decoded meanwhile decide.
    """

    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and (isinstance(self.every, bool) or self.every < 1):
            raise BadParameter(f"schedule={self.every!r} must be 1 token or more.")

    def evict_now(self, held: int, budget: int) -> bool:
        return self.every is not None and held >= budget + self.every


NAMES = {"prompt": Schedule(), "step": Schedule(1), "buffer": Schedule(128)}


def as_schedule(value: str | int | Schedule) -> Schedule:
    """One of "prompt", "step", "buffer" (128 tokens), a number of tokens, or a Schedule."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, int):
        return Schedule(value)
    if value in NAMES:
        return NAMES[value]
    raise BadParameter(f"schedule={value!r} is not known; use {', '.join(map(repr, NAMES))}, or a number of tokens.")
