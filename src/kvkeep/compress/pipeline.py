"""The pipeline: update token state, score, guard, rerank, group, allocate, select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvkeep.compress.attention import token_mask
from kvkeep.compress.budget.coverage import amounts, covered
from kvkeep.compress.budget.heads import Candidates, SharedBudget
from kvkeep.compress.method import Method
from kvkeep.compress.protocols import Scorer, ScorerTraits
from kvkeep.kernels.dispatch import places_of, ranks
from kvkeep.kernels.torch.ranking import Units, inverse, ranked
from kvkeep.types import Observation, Selection, Tokens


def update_token_state(seen: Observation, method: Method, budget: int) -> Observation:
    """The observation with the token state that the method's memory computes from it."""
    return replace(seen, token_state=method.memory(seen, budget)) if method.memory else seen


def compress(seen: Observation, method: Method, budget: int, layer_budget: int | None = None) -> Selection | None:
    """The tokens this layer keeps, given a mean budget per KV head; None where all of them fit."""
    kept = decide(seen, method, budget, layer_budget)
    return kept.known() if isinstance(kept, PlacedSelection) else kept


def decide(
    seen: Observation, method: Method, budget: int, layer_budget: int | None = None
) -> Selection | PlacedSelection | None:
    """The same; on a GPU, without waiting for it.

    layer_budget: the layer's own, where it depends on all layers
    """
    if method.scorer is None or fits(seen, method, budget):
        return None
    if layer_budget is None:
        layer_budget = layer_budgets(method, budget, seen.seq_len, [1.0] * seen.layers)[seen.layer]
    if not covers(seen, method) and all(n <= layer_budget for n in seen.lengths):
        return None
    scores, forced, units, tokens = score(seen, method, method.scorer, budget, layer_budget)
    if covers(seen, method):
        return cover(seen, method, layer_budget, scores, forced, units, tokens)
    rank = places_in_order(seen, scores, forced, units, tokens)
    given = scores, forced, seen.lengths, layer_budget, units
    if counts := getattr(method.heads, "counts", None):
        total = min(seen.kv_heads * layer_budget, sum(seen.lengths))
        return PlacedSelection.of(rank, counts(*given, rank), total)
    return PlacedSelection.of_quota(rank, method.heads(*given))


def covers(seen: Observation, method: Method) -> bool:
    """The scores decide how many tokens are kept, within the budget: after a prefill, not in decode."""
    return method.needed is not None and not seen.is_step


def fits(seen: Observation, method: Method, budget: int) -> bool:
    """Nothing has to be evicted."""
    return seen.seq_len <= budget and not covers(seen, method)


def cover(
    seen: Observation, method: Method, budget: int, scores: Tensor, forced: Tensor, units: Units | None, tokens: Tensor
) -> Selection:
    """Keep as many tokens as are needed by their scores. budget: the layer's; the rest as in `score`"""
    assert method.needed is not None
    order, each = ranked(scores, forced, tokens, units), amounts(scores, tokens & ~forced)
    rank, given = inverse(order), (scores, forced, seen.lengths, budget, units)
    if counts := getattr(method.heads, "counts", None):
        quota = counts(*given, rank, method.needed).tolist()
    else:
        needed = method.needed.count(each.gather(1, order)).maximum(forced.sum(1))
        quota = [min(pair) for pair in zip(method.heads(*given), needed.tolist(), strict=True)]
    kept = each.masked_fill(rank >= torch.tensor(quota, device=rank.device)[:, None], 0.0)
    return replace(PlacedSelection.of_quota(rank, quota).known(), coverage=covered(kept.sum(), each.sum()))


def score(
    seen: Observation, method: Method, scorer: Scorer, budget: int, layer_budget: int
) -> tuple[Tensor, Tensor, Units | None, Tensor]:
    """Scores, -inf for padding; forced tokens; units; which are tokens, not padding. [kv_heads, n]"""
    cache_key = ScorerTraits.one(scorer, "cache_key")(budget)
    scores = seen.memoize(cache_key and (scorer, cache_key), lambda: scorer(seen, budget))
    guard, tokens = method.guard.fit_to(budget), token_mask(seen)
    forced = seen.once(("forced", guard, budget), lambda: guard(seen, budget))
    free = seen.once(("free", guard, budget), lambda: tokens & ~forced)
    if method.rerank:
        scores = method.rerank(seen, scores, free, (layer_budget - forced.sum(1)).clamp_min(0))
    units = method.group(seen, scores, free) if method.group else None
    return scores.masked_fill(~tokens, float("-inf")) if seen.is_padded else scores, forced, units, tokens


def places_in_order(seen: Observation, scores: Tensor, forced: Tensor, units: Units | None, tokens: Tensor) -> Tensor:
    """The place of each token in its head's order. [kv_heads, n]; the arguments are those that `score` returns"""
    by_unit = () if units is None else (units.member, units.scores)
    return ranks(scores, forced, tokens if seen.is_padded else None, *by_unit)


def candidates(seen: Observation, method: Method, budget: int, held: Tokens) -> Candidates:
    """A layer's tokens, ready to compete with those of other layers for one budget. held: [kv_heads, n, …]"""
    assert method.scorer is not None and isinstance(method.heads, SharedBudget)
    scores, forced, units, tokens = score(seen, method, method.scorer, budget, budget)
    rank = places_in_order(seen, scores, forced, units, tokens)
    whole = amounts(scores, tokens & ~forced).sum() if covers(seen, method) else None
    sure = method.heads.sure(forced, budget if method.needed is None else 0)
    return Candidates.of(held, scores, rank, sure, units, whole, seen.is_padded)


def layer_budgets(method: Method, budget: int, tokens: int, weights: Sequence[float]) -> list[int]:
    """The budget of every layer, given their weights where the method compares layers."""
    floor = max(1, method.guard.fit_to(budget).size(budget))
    return method.layers(budget, floor, tokens, list(weights) if method.layers.layer_weight else len(weights))


@dataclass(frozen=True)
class PlacedSelection:
    """A selection whose lengths may be known to the device alone: the host need not wait for them."""

    places: Tensor  # [2, total] KV head and token index of what is kept, head by head, ascending
    counts: Tensor  # [kv_heads] tokens kept per KV head
    lengths: tuple[int, ...] | None = None  # the same, where the host knows them

    @classmethod
    def of(cls, rank: Tensor, counts: Tensor, total: int) -> PlacedSelection:
        return cls(places_of(rank, counts, total), counts)

    @classmethod
    def of_quota(cls, rank: Tensor, quota: Sequence[int]) -> PlacedSelection:
        """The first `quota` of each head's order."""
        counts = rank.new_full((len(quota),), quota[0])  # without waiting for the device
        if len(set(quota)) > 1:
            counts = torch.tensor(quota, device=rank.device)
        return cls(places_of(rank, counts, sum(quota)), counts, tuple(quota))

    def known(self) -> Selection:
        """Wait for the lengths."""
        lengths = self.lengths or tuple(self.counts.tolist())
        if len(set(lengths)) == 1:
            return Selection(self.places[1].view(len(lengths), lengths[0]), lengths)
        return Selection(pad_sequence(list(self.places[1].split(lengths)), True), lengths)
