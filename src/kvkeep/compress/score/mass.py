"""All the attention a token ever got, kept beside it and growing with the text: H2O (arXiv:2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.kernels.reference import column_mass
from kvkeep.types import Observation


@dataclass(frozen=True)
class Mass:
    """Scores by what is remembered; `Accumulate` remembers it."""

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return seen.notes[..., 0]


@dataclass(frozen=True)
class Accumulate:
    """Adds the new queries' attention to every token's sum. Notes are [kv_heads, n, 1]."""

    width = 1

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return (
            seen.notes
            + column_mass(seen.queries, seen.keys, seen.positions, seen.cursor, seen.scale, seen.softcap, seen.sinks)[
                ..., None
            ]
        )
