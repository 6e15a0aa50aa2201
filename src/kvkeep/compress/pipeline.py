"""The one flow: score, guard, group, allocate, select."""

from __future__ import annotations

from kvkeep.compress.method import Method
from kvkeep.compress.observe import real
from kvkeep.compress.select import select
from kvkeep.types import Observation, Selection


def compress(seen: Observation, method: Method, budget: int) -> Selection | None:
    """What this layer keeps of a mean budget per key head; None where all of it fits."""
    if method.scorer is None:
        return None
    method.guard.check(budget, method.name)
    floor = max(1, method.guard.size(budget))
    share = method.layers(budget, floor, seen.cursor, seen.layers)[seen.layer]
    if all(n <= share for n in seen.lengths):
        return None
    scores = method.scorer(seen, budget)
    forced, tokens = method.guard(seen, budget), real(seen)
    units = method.group(seen, scores, tokens & ~forced) if method.group else None
    scores = scores.masked_fill(~tokens, float("-inf"))
    quota = method.heads(scores, forced, seen.lengths, share)
    return select(scores, forced, tokens, units, quota)
