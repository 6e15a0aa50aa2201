"""All the attention a token ever got, kept beside it and growing with the text: H2O (arXiv:2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.kernels.dispatch import column_mass
from kvkeep.types import Observation, Step


@dataclass(frozen=True)
class Mass:
    """Scores by what is remembered; `Accumulate` remembers it."""

    looks = True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return seen.notes[..., 0]

    def step(self, now: Step, budget: int) -> Tensor:
        return now.notes[..., 0]


@dataclass(frozen=True)
class Accumulate:
    """Adds the new queries' attention to every token's sum. Notes are [kv_heads, n, 1]."""

    width = 1
    sees_all = True  # every query of a prompt adds to the sum

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        how = seen.scale, seen.softcap, seen.sinks, None, seen.sums
        mass = seen.once(self, lambda: column_mass(seen.queries, seen.keys, seen.positions, seen.cursor, *how))
        return seen.notes + mass[..., None]

    def step(self, now: Step, budget: int) -> Tensor:
        return now.notes + now.chances.mean(2)[..., None]
