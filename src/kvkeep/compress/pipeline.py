"""The pipeline: update token state, score, guard, group, allocate, select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvkeep.compress.attention import token_mask
from kvkeep.compress.method import Method
from kvkeep.compress.protocols import ScorerTraits
from kvkeep.compress.select import first, ranked
from kvkeep.types import Observation, Selection


def update_token_state(seen: Observation, method: Method, budget: int) -> Observation:
    """The observation with the token state that the method's memory computes from it."""
    return replace(seen, token_state=method.memory(seen, budget)) if method.memory else seen


def compress(seen: Observation, method: Method, budget: int, layer_budget: int | None = None) -> Selection | None:
    """The tokens this layer keeps, given a mean budget per key head; None where all of them fit.

    layer_budget: the layer's own, where it depends on all layers
    """
    if method.scorer is None or seen.seq_len <= budget:
        return None
    if layer_budget is None:
        layer_budget = layer_budgets(method, budget, seen.seq_len, [1.0] * seen.layers)[seen.layer]
    if all(n <= layer_budget for n in seen.lengths):
        return None
    scorer, cache_key = method.scorer, ScorerTraits.of(method.scorer).cache_key(budget)
    scores = seen.memoize(cache_key and (scorer, cache_key), lambda: scorer(seen, budget))
    forced, tokens = method.guard.fit_to(budget)(seen, budget), token_mask(seen)
    units = method.group(seen, scores, tokens & ~forced) if method.group else None
    scores = scores.masked_fill(~tokens, float("-inf"))
    order = ranked(scores, forced, tokens, units)
    known = (order,) if getattr(method.heads, "takes_order", False) else ()
    return first(order, method.heads(scores, forced, seen.lengths, layer_budget, units, *known))


def layer_budgets(method: Method, budget: int, tokens: int, weights: Sequence[float]) -> list[int]:
    """The budget of every layer, given their weights where the method compares layers."""
    floor = max(1, method.guard.fit_to(budget).size(budget))
    return method.layers(budget, floor, tokens, list(weights) if method.layers.layer_weight else len(weights))
