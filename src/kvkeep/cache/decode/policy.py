"""What decode steps do to the tokens of a cache: one choice, for an engine's batches and for `model.generate`."""

from __future__ import annotations

from enum import Enum

from kvkeep.cache.cache_state import CacheState
from kvkeep.cache.decode.retrieval_rows import RetrievalPlan
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.cache.retrieval import RetrievalBackend
from kvkeep.compress.budget.heads import AdaptiveHeads, EqualHeads
from kvkeep.compress.budget.layers import EqualLayers
from kvkeep.compress.guard import effective_window
from kvkeep.compress.scorers.window import SnapKVScorer
from kvkeep.compress.step_rule import StepRule
from kvkeep.kernels.torch.votes import VoteRule
from kvkeep.model.hf_cache import layer_devices


class Policy(Enum):
    """What a step does after it appended a token to every row. Its value names the kind of a batch."""

    APPEND = "append"  # nothing
    EVICT_ONE = "evict one"  # it evicts one token of every KV head that is full
    VOTE = "vote"  # it evicts as many tokens as there are KV heads, those that the newest queries attend to least
    EVICT = "evict"  # nothing, but every so many steps rows are evicted from, between two of them
    RETRIEVE = "retrieve"  # it attends to retrieved tokens; what leaves the near window is offloaded between steps
    ALONE = "alone"  # anything: only the cache itself can do it

    @staticmethod
    def of(cache: CacheState) -> Policy:
        """The policy of a prefilled cache."""
        if cache.hf_layers:
            return Policy.ALONE
        if _appends(cache):
            return Policy.APPEND
        if evict_one_rule(cache):
            return Policy.EVICT_ONE
        if vote_rule(cache):
            return Policy.VOTE
        if _evicts_between_steps(cache):
            return Policy.EVICT
        return Policy.RETRIEVE if retrieval_plan(cache) else Policy.ALONE


def _appends(cache: CacheState) -> bool:
    method = cache.method
    return method.retrieval is None and (cache.tracker.frozen or method.schedule.every is None or method.scorer is None)


def evict_one_rule(cache: CacheState) -> StepRule | None:
    """If each decode step evicts one token of every KV head of a full cache, and else appends: what is evicted."""
    backend, tracker = cache.backend, cache.tracker
    if not isinstance(backend, EvictingBackend) or cache.hf_layers:
        return None
    if tracker.frozen or min(tracker.seen, default=0) <= tracker.whole:
        return None
    return backend.steps.rule if backend.steps.rule.evicts and backend.steps.is_possible() else None


def vote_rule(cache: CacheState) -> VoteRule | None:
    """If each decode step of a full cache evicts by the votes of the newest queries: what is kept."""
    backend, tracker, method, budget = cache.backend, cache.tracker, cache.method, cache.budget
    scorer, heads, guard = method.scorer, method.heads, method.guard
    if not isinstance(backend, EvictingBackend) or cache.shards or not isinstance(budget, int):
        return None
    if type(scorer) is not SnapKVScorer or not scorer.window == guard.window == method.observation_window:
        return None
    changes = method.group or method.memory or method.rerank or method.placement or method.summary or method.needed
    equal = isinstance(method.layers, EqualLayers) and method.reuse == 1
    if changes or not equal or type(heads) not in (EqualHeads, AdaptiveHeads) or method.schedule.every != 1:
        return None
    if budget < 2 or tracker.frozen or min(tracker.seen, default=0) <= tracker.whole:
        return None
    window, (sinks, recent) = effective_window(scorer.window, budget), guard.sinks_and_recent(budget)
    if any(sum(layer.lengths) > budget * len(layer.lengths) for layer in backend.store.values()):
        return None  # more than one step evicts
    if backend.query_buffer.num_held(0) < min(scorer.window, *tracker.seen):
        return None
    alpha = heads.alpha if isinstance(heads, AdaptiveHeads) else 1
    sure = sinks + recent + int(alpha * (budget - sinks - recent))
    return VoteRule(budget, sure, window, sinks, recent, scorer.pool, scorer.pooling)


def _evicts_between_steps(cache: CacheState) -> bool:
    backend, method = cache.backend, cache.method
    if not isinstance(backend, EvictingBackend) or cache.bits or cache.shards:
        return False
    if method.scorer is None or (method.schedule.every or 1) == 1 or method.placement or method.summary:
        return False
    return method.memory is None or getattr(method.memory, "prompt_only", False)


def retrieval_plan(cache: CacheState) -> RetrievalPlan | None:
    """How a pool decodes a prefilled cache; None where it cannot.

    Not of units that differ in size, of fractional budgets, of `once`, of tokens on disk, of models on several devices.
    """
    backend = cache.backend
    if not isinstance(backend, RetrievalBackend) or not backend.states or cache.hf_layers or cache.shards:
        return None
    states = [rows[0] for rows in backend.states.values()]
    plan = RetrievalPlan.of(backend, cache.config.num_attention_heads)
    on_host = all(state.host.table or state.host.device.type == "cpu" for state in states)
    uniform = all(not state.host.tokens or (plan and state.unit_size == plan.shape.unit) for state in states)
    one_device = len({state.near.keys.device for state in states} | set(layer_devices(cache.model).values())) == 1
    return plan if on_host and uniform and one_device else None
