"""Attention accumulated over all queries, stored with each token: H2O (arXiv:2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.kernels.dispatch import column_mass
from kvkeep.types import Observation, Step


@dataclass(frozen=True)
class H2OScorer:
    """Scores by the token state of `AccumulatedAttention`."""

    per_head = True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return seen.token_state[..., 0]

    def step(self, now: Step, budget: int) -> Tensor:
        return now.token_state[..., 0]


@dataclass(frozen=True)
class AccumulatedAttention:
    """Adds the new queries' attention to every token's sum. token_state [kv_heads, n, 1]"""

    width = 1
    sees_all = True  # every query of a prompt counts, not only the observation window
    uses_lse = True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        where = seen.token_positions, seen.seq_len
        softmax = seen.scale, seen.softcap, seen.sink_logits, None, seen.lse
        mass = seen.memoize(self, lambda: column_mass(seen.queries, seen.keys, *where, *softmax))
        return seen.token_state + mass[..., None]

    def step(self, now: Step, budget: int) -> Tensor:
        return now.token_state + now.probs.mean(2)[..., None]
