"""The one flow: remember, score, guard, group, allocate, select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvkeep.compress.attention import real
from kvkeep.compress.method import Method
from kvkeep.compress.select import select
from kvkeep.types import Observation, Selection


def remember(seen: Observation, method: Method, budget: int) -> Observation:
    """The same observation, with what the method notes of each token brought up to date."""
    return replace(seen, notes=method.memory(seen, budget)) if method.memory else seen


def compress(seen: Observation, method: Method, budget: int, share: int | None = None) -> Selection | None:
    """What this layer keeps of a mean budget per key head; None where all of it fits.

    share: the layer's own budget, where all layers had to be seen to know it
    """
    if method.scorer is None:
        return None
    if seen.cursor <= budget:
        return None
    if share is None:
        share = shares(method, budget, seen.cursor, [1.0] * seen.layers)[seen.layer]
    if all(n <= share for n in seen.lengths):
        return None
    matters = getattr(method.scorer, "matters", lambda budget: None)(budget)
    scores = seen.once(matters and (method.scorer, matters), lambda: method.scorer(seen, budget))
    forced, tokens = method.guard.within(budget)(seen, budget), real(seen)
    units = method.group(seen, scores, tokens & ~forced) if method.group else None
    scores = scores.masked_fill(~tokens, float("-inf"))
    quota = method.heads(scores, forced, seen.lengths, share, units)
    return select(scores, forced, tokens, units, quota)


def shares(method: Method, budget: int, tokens: int, weights: Sequence[float]) -> list[int]:
    """Every layer's budget, given the layers' weights where the method compares them."""
    floor = max(1, method.guard.within(budget).size(budget))
    return method.layers(budget, floor, tokens, list(weights) if method.layers.weigh else len(weights))
