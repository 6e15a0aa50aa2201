"""Attention that queries yet to come are expected to pay: Expected Attention (arXiv:2510.00636).

The text's queries, without their rotation, are taken for normally distributed; moved to the positions after the text,
their mean and covariance give every key's expected attention in closed form. It is weighted by the values' norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.arguments import Amount, Checked, Count, Positive
from kvkeep.compress.attention import any_budget, gram, norms, token_mask
from kvkeep.kernels.dispatch import quadratic_form
from kvkeep.types import Observation, Rotate

AMONG_HEADS = 0.02
BLOCK = 8192  # queries that are rotated at a time


@dataclass(frozen=True)
class QueryMoments(Checked):
    """Sums over a prompt's queries from position `sinks` on, all at position 0: of q qᵀ, of q, and their number.

    [heads, dim + 2, dim] float64; of several passes, they are added
    """

    sinks: Count = 4
    rotates = True

    def rows(self, dim: int) -> int:
        return dim + 2

    def __call__(self, queries: Tensor, first: int, rotate: Rotate) -> Tensor:
        """queries [heads, n, dim] at positions first, first + 1, …"""
        queries, first = queries[:, max(0, self.sinks - first) :], max(first, self.sinks)
        heads, n, dim = queries.shape
        sums = torch.zeros(heads, dim + 2, dim, dtype=torch.float64, device=queries.device)
        sums[:, -1] = n
        for start in range(0, n, BLOCK):
            part = queries[:, start : start + BLOCK]
            by = -torch.arange(first + start, first + start + part.shape[1], device=queries.device)
            plain = rotate(part, by, torch.float32)
            sums[:, :-2] += gram(plain)
            sums[:, -2] += plain.sum(1)
        return sums


@dataclass(frozen=True)
class ExpectedAttentionScorer(Checked):
    """Scores by the sums of `QueryMoments`, in the place of queries."""

    future: Positive = 512
    sinks: Count = 4
    epsilon: Amount | None = None  # None: 0, or AMONG_HEADS where heads compete for a budget
    covariance: bool = True
    value_norms: bool = True
    cache_key = any_budget

    def among_heads(self) -> ExpectedAttentionScorer:
        """Score as the authors do where heads compete: a head whose attention is spread keeps some tokens."""
        return replace(self, epsilon=AMONG_HEADS) if self.epsilon is None else self

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        mean, covariance = self._expected(seen)
        hidden = ~token_mask(seen) | (seen.token_positions < self.sinks)
        if self.covariance:
            logits = quadratic_form(seen.keys, covariance * (seen.scale**2 / 2), mean * seen.scale)
            logits = logits.unflatten(0, (seen.kv_heads, -1))
        else:
            logits = (mean * seen.scale).unflatten(0, (seen.kv_heads, -1)) @ seen.keys.float().transpose(1, 2)
        scores = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1).nan_to_num_(0.0).mean(1)
        return (scores + (self.epsilon or 0.0)) * norms(seen.values).float() if self.value_norms else scores

    def _expected(self, seen: Observation) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the next `future` queries. [heads, dim] and [heads, dim, dim]"""
        products, sums, number = seen.queries[:, :-2], seen.queries[:, -2], seen.queries[:, -1, :1].clamp_min(1)
        mean = sums / number
        covariance = products / number[..., None] - mean[:, :, None] * mean[:, None]
        turn = seen.once(("future", self, seen.rotate), lambda: self._mean_rotation(seen)).to(mean.dtype)
        return (mean @ turn).float(), (turn.T @ covariance @ turn).float()

    def _mean_rotation(self, seen: Observation) -> Tensor:
        """Transposed: row i is where the unit vector i is moved to on average. [dim, dim]"""
        dim, device = seen.keys.shape[-1], seen.keys.device
        by = torch.arange(seen.seq_len, seen.seq_len + self.future, device=device)[:, None].expand(-1, dim)
        return seen.rotate(torch.eye(dim, device=device).expand(self.future, -1, -1), by).mean(0)
