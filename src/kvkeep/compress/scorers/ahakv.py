"""Attention of recent queries, scaled with length and weighted by values: AhaKV.

Every token is scored by the same number of recent queries; logits grow with the text so that long contexts do not
flatten the softmax; tokens with large values score higher. While decoding, each step's attention is added unweighted
(the paper's Algorithm 1, lines 19 and 27); with `decode_prior` the values weight it too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Odd, Positive
from kvkeep.compress.attention import attention_received, squared_value_norms, token_mask
from kvkeep.compress.guard import effective_window
from kvkeep.kernels.dispatch import column_mass
from kvkeep.kernels.torch.scoring import pool
from kvkeep.types import Observation, Step

Gain = Literal["replace", "multiply"]


@dataclass(frozen=True)
class AhaKVScorer(Checked):
    """Scores by the token state of `RecentAttention`, pooled after a prompt."""

    pool: Odd = 5
    value_prior: bool = False  # True: the token state is unweighted, and weighted by values here

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        tokens = token_mask(seen)
        scores, norms = seen.token_state.unbind(-1)
        if self.value_prior:
            scores = scores * relative_value_norms(norms * tokens)
        return scores if seen.is_step else pool(scores, tokens, self.pool)

    def step(self, now: Step, budget: int) -> Tensor:
        scores, norms = now.token_state.unbind(-1)
        return scores * norms if self.value_prior else scores


@dataclass(frozen=True)
class RecentAttention(Checked):
    """token_state [kv_heads, n, 2]: a token's score, and the squared norm of its value, fixed when first seen.

    Scores of a prompt are the attention of its recent queries, weighted by values with value_prior; a decode step adds
    its attention unweighted.
    """

    recent: Positive = 32
    value_pool: Odd = 5
    step_gain: bool = True
    value_prior: bool = True
    gain: Gain = "replace"  # step gain instead of the model's scale, or "multiply": on top of it
    recent_only: bool = True  # False: all queries of a prompt count (the paper's ablation of recent accumulation)
    width = 2

    @property
    def sees_all(self) -> bool:
        """Whether every query of a prompt counts, or the observation window only."""
        return not self.recent_only

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        old_scores, old_norms = seen.token_state.unbind(-1)
        tokens = token_mask(seen)
        norms = pool(squared_value_norms(seen) * tokens, tokens, 1 if seen.is_step else self.value_pool)
        norms = torch.where(old_norms > 0, old_norms, norms)
        scores = self._scores(seen, budget)
        if self.value_prior and not seen.is_step:
            scores = scores * relative_value_norms(norms * tokens)
        return torch.stack([old_scores + scores if seen.is_step or self.sees_all else scores, norms], -1)

    def _scores(self, seen: Observation, budget: int) -> Tensor:
        """Attention each token receives from the queries that count. [kv_heads, n]"""
        window = seen.queries.shape[1] if self.sees_all else max(1, effective_window(self.recent, budget))
        rows = 1 if seen.is_step else window
        scaled = scale_queries(seen, rows, budget, self.gain) if self.step_gain else seen
        if not self.sees_all:
            return attention_received(scaled, rows)
        softmax = seen.scale, seen.softcap, seen.sink_logits
        return column_mass(scaled.queries, seen.keys, seen.token_positions, seen.seq_len, *softmax)

    def step(self, now: Step, budget: int) -> Tensor:
        if self.step_gain:
            factor = gain(now.lengths, budget, now.value.shape[-1], now.scale, self.gain)
            probs = scaled_probs(now, factor[:, None, None, None])
        else:
            probs = now.probs
        token_state = now.token_state.clone()
        token_state[..., 0] += probs.mean(2)
        token_state[..., 1].scatter_(2, now.newest[..., None], now.value.float().square().sum(-1, keepdim=True))
        return token_state


def relative_value_norms(norms: Tensor) -> Tensor:
    """Norms relative to a head's largest; ones where all are zero. [kv_heads, n]"""
    largest = norms.amax(1, keepdim=True)
    return torch.where(largest > 0, norms / largest.clamp_min(1e-30), 1.0)


def scaled_probs(now: Step, factor: Tensor) -> Tensor:
    """The step's probs for queries scaled by a factor, with the same soft cap and sink logits."""
    logits, cap = now.logits, now.softcap
    if cap is None:
        return now.softmax(logits * factor)
    scaled = ((logits / cap).atanh() * factor).tanh() * cap
    return now.softmax(scaled.masked_fill(logits == float("-inf"), float("-inf")))


def gain(lengths: Tensor, budget: int, dim: int, scale: float, kind: str = "replace") -> Tensor:
    """Step gain as a factor of the model's logits, float32: 1 up to the budget B, for positions i > B

    "replace": the softmax scale is sqrt(2 ln(i/B)/dim) instead of the model's; "multiply": both (λ·QKᵀ/√d).
    """
    grown = (lengths.double() / budget).clamp_min(1.0)
    factor = (2 * grown.log() / dim).sqrt() / (scale if kind == "replace" else 1.0)
    return factor.masked_fill(lengths <= budget, 1.0).float()


def scale_queries(seen: Observation, rows: int, budget: int, kind: str = "replace") -> Observation:
    """The observation with each of the last queries scaled by its step gain."""
    queries = seen.queries[:, -rows:].float()
    lengths = torch.arange(seen.seq_len - queries.shape[1] + 1, seen.seq_len + 1, device=queries.device)
    factors = gain(lengths, budget, queries.shape[-1], seen.scale, kind)
    return replace(seen, queries=queries * factors[:, None])
