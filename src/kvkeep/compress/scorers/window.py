"""Attention of the newest queries, the observation window: SnapKV, and methods that weigh the same attention otherwise.

Deviation of all: attention is averaged over the query heads of a KV head before pooling; padding is not pooled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.arguments import Amount, Checked, Cosine, Odd, Positive, Seed, Share
from kvkeep.compress.attention import (
    any_budget,
    attention,
    attention_received,
    distance_from_end,
    layer_seed,
    mean_and_variance,
    token_mask,
    uniform,
)
from kvkeep.compress.budget.coverage import CERTAIN
from kvkeep.compress.guard import effective_window
from kvkeep.kernels.torch.ranking import best_first, inverse
from kvkeep.kernels.torch.scoring import pool, probabilities
from kvkeep.types import Observation, Step

COMPARED = 2**26  # cosines at a time


@dataclass(frozen=True)
class SnapKVScorer(Checked):
    """Attention of the window, pooled: SnapKV (arXiv:2404.14469)."""

    window: Positive = 64
    pool: Odd = 5
    pooling: Literal["avg", "max"] = "avg"
    per_head = True

    def cache_key(self, budget: int) -> int:
        return 1 + effective_window(self.window, budget)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = effective_window(self.window, budget)
        among = seen.once(("before", window), lambda: distance_from_end(seen) >= window)
        return pool(attention_received(seen, max(1, window)), among, self.pool, self.pooling)


@dataclass(frozen=True)
class TovaScorer:
    """One query, one selection per layer, cheap enough for every step: TOVA (arXiv:2401.06104)."""

    cache_key = any_budget

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        scores = attention_received(seen, 1)
        return scores.mean(0, keepdim=True).expand_as(scores)

    def step(self, now: Step, budget: int) -> Tensor:
        scores = now.probs.mean((1, 2), keepdim=True)[:, 0]
        return scores.expand(-1, now.probs.shape[1], -1)


@dataclass(frozen=True)
class LookaheadScorer(Checked):
    """Attention of queries after the text: those of a draft of the answer (Lookahead Q-Cache, arXiv:2505.20334).

    A few tokens are decoded from what a cheap method keeps of the text; their queries, or those that predict them
    (`Draft.predicting`), look for what the answer needs. Every query sees every token; the text's last `window` tokens
    are kept. In decode, where there is no draft, the newest queries score, and see what is before them.
    """

    window: Positive = 64
    pool: Odd = 5
    pooling: Literal["avg", "max"] = "avg"
    norm: Literal[0, 1, 2] = 1  # of all queries' attention to a token: 1 or 2; 0: the most counts
    per_head = True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = effective_window(self.window, budget)
        rows = attention(seen, max(1, window)) if seen.is_step else self._draft_attention(seen)
        return pool(self._votes(rows), distance_from_end(seen) >= window, self.pool, self.pooling)

    def _draft_attention(self, seen: Observation) -> Tensor:
        visible = token_mask(seen)[:, None].expand(-1, seen.queries.shape[1], -1)
        return probabilities(seen.queries, seen.keys, visible, seen.scale, seen.softcap, seen.sink_logits)

    def _votes(self, rows: Tensor) -> Tensor:
        """[kv_heads, group, queries, n] -> [kv_heads, n]"""
        if self.norm == 0:
            return rows.amax((1, 2))
        return rows.mean((1, 2)) if self.norm == 1 else rows.square().mean((1, 2)).sqrt()


@dataclass(frozen=True)
class CakeScorer(Checked):
    """The mean attention plus its variance: tokens of varying attention score higher (CAKE, arXiv:2503.12491)."""

    window: Positive = 32
    gamma: Amount = 200.0
    pool: Odd = 5

    def cache_key(self, budget: int) -> int:
        return 1 + effective_window(self.window, budget)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = effective_window(self.window, budget)
        mean, variance = mean_and_variance(attention(seen, max(1, window)))
        return pool((mean + self.gamma * variance).mean(1), distance_from_end(seen) >= window, self.pool)


@dataclass(frozen=True)
class ProtoKVScorer(Checked):
    """What ProtoKV scores clusters of keys by (`Prototypes`).

    Summed raw logits of the window, as the paper prints it; or its attention, as SnapKV's mechanism suggests.
    """

    window: Positive | None = None
    votes: Literal["raw", "softmax"] = "softmax"

    @property
    def signed(self) -> bool:
        """Whether scores may be negative."""
        return self.votes == "raw"

    @property
    def one_scale(self) -> bool:
        return self.votes == "softmax"

    def cache_key(self, budget: int) -> int:
        return max(1, effective_window(self.window, budget))

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        rows = self.cache_key(budget)
        if self.votes == "softmax":
            return attention_received(seen, rows)
        query = seen.queries[:, -rows:].float().sum(1).view(seen.kv_heads, -1, seen.keys.shape[-1]).mean(1)
        return (seen.keys.float() @ query[..., None]).squeeze(-1)


@dataclass(frozen=True)
class NaclScorer(Checked):
    """Part of the budget by attention, part sampled from the rest: NACL (arXiv:2408.03675).

    Deviations: the observation window is causal and kept, as in the paper's equation (its table 4 protects fewer
    tokens). Sampling without replacement from softmax(scores) adds Gumbel noise, seeded per layer.
    """

    window: Positive = 32
    random: Share = 0.7  # fraction of the free budget that is sampled; the authors' code has 0.37
    seed: Seed = 0
    additive = False  # some are noise, some are certain

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = effective_window(self.window, budget)
        scores = attention_received(seen, max(1, window))
        free = budget - window
        ranked = free - int(self.random * free + 1e-9)
        candidates = scores.masked_fill(distance_from_end(seen) < window, float("-inf"))
        rank = inverse(best_first(candidates))
        return scores + self._noise(seen).where(rank >= ranked, CERTAIN)

    def _noise(self, seen: Observation) -> Tensor:
        """Standard Gumbel noise, the same on every device."""
        counters = torch.arange(seen.kv_heads * seen.tokens, device=seen.keys.device)
        drawn = uniform(layer_seed(self.seed, seen.layer), counters)
        return -(-drawn.log()).log().float().view(seen.kv_heads, -1)


@dataclass(frozen=True)
class RKVScorer(Checked):
    """Attention, less so where other keys are alike: R-KV (arXiv:2505.24133), for reasoning.

    Redundancy is a key's mean cosine to the other keys of its head, softmaxed. Of keys that are alike the most recent
    one is spared: those before it do not count against it.
    """

    window: Positive = 8
    pool: Odd = 7
    importance: Share = 0.1  # of the score, the rest is redundancy
    alike: Cosine = 0.5
    signed, one_scale, per_head = True, False, True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = effective_window(self.window, budget)
        rows = max(1, window)
        attended = attention_received(seen, rows) / min(rows, seen.queries.shape[1])
        pooled = pool(attended, distance_from_end(seen) >= window, self.pool, "max")
        return self.importance * pooled - (1 - self.importance) * redundancy(seen.keys, token_mask(seen), self.alike)


def redundancy(keys: Tensor, tokens: Tensor, alike: float) -> Tensor:
    """[kv_heads, n, dim], [kv_heads, n] -> [kv_heads, n] float32"""
    heads, n = tokens.shape
    unit = normalize(keys.float(), dim=-1) * tokens[..., None]
    rows = max(1, COMPARED // (heads * n))
    place = torch.arange(n, device=keys.device)
    cosines = torch.cat([_to_others(unit, place, first, rows, alike) for first in range(0, n, rows)], 1)
    mean = cosines / (tokens.sum(1, keepdim=True) - 1).clamp_min(1)
    return mean.masked_fill(~tokens, float("-inf")).softmax(-1)


def _to_others(unit: Tensor, place: Tensor, first: int, rows: int, alike: float) -> Tensor:
    """Summed cosines of some keys to all others, but for those before the most recent of keys that are alike."""
    mine = place[first : first + rows, None]
    cosine = (unit[:, first : first + rows] @ unit.transpose(1, 2)).masked_fill_(mine == place, 0)
    is_alike = cosine > alike
    is_newest = ~(is_alike & (place > mine)).any(-1, keepdim=True)
    return cosine.masked_fill_(is_alike & is_newest, 0).sum(-1)
