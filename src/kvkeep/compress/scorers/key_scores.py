"""Scores of keys and values alone: no query is needed, so a text may be compressed before any question is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.arguments import Checked, Count, Positive, Range
from kvkeep.compress.attention import any_budget, distance_from_end, norms, outlier_degree, token_mask
from kvkeep.compress.budget.coverage import CERTAIN
from kvkeep.kernels.torch.ranking import best_first, inverse
from kvkeep.types import Observation

SINK, RECENT = 1.0, 3.0  # of CERTAIN: scores of those tokens; the earliest sink and the newest token come first


@dataclass(frozen=True)
class KeyNormScorer:
    """Keys of small norm attract attention (arXiv:2406.11430)."""

    signed, one_scale = True, False
    cache_key = any_budget

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return -norms(seen.keys).float()


@dataclass(frozen=True)
class KeyDiffScorer:
    """Keys unlike the mean direction of all keys of their head: KeyDiff (arXiv:2504.15364).

    1 - cosine instead of the paper's -cosine: the same order, and no negative scores.
    """

    cache_key = any_budget

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        unit = normalize(seen.keys.float(), dim=-1)
        mean = normalize((unit * token_mask(seen)[..., None]).sum(1), dim=-1)
        return 1 - torch.linalg.vecdot(unit, mean[:, None])


@dataclass(frozen=True)
class SatKVScorer(Checked):
    """Outlier keys: SATKV (ProtoKV)."""

    kappa: Positive = 5
    additive = False  # some are negative
    cache_key = any_budget

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        return outlier_degree(seen, self.kappa)


@dataclass(frozen=True)
class LagKVScorer(Checked):
    """Tokens that stand out of their partition, seen on the scale of the next one: LagKV (arXiv:2504.04704).

    After the sinks, tokens come in partitions of `lag`, counted among those held. Keys and values are scaled per
    channel by the next partition's minimum and maximum; a token whose channels then spread widely scores high. Tokens
    are ranked within their partition, so that each keeps its share. The last whole partition and what follows have no
    next one: they are kept, and the sinks, while the budget allows.
    """

    sinks: Count = 4
    lag: Annotated[int, Range(2)] = 128
    additive = False  # ranks
    cache_key = any_budget

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        age = distance_from_end(seen)
        index = torch.arange(seen.tokens, device=age.device)
        length = age[:, :1] + 1
        partitions = (length - self.sinks) // self.lag
        middle = (self.sinks + self.lag * (partitions - 1)) * (partitions > 1)  # where it ends
        scores = CERTAIN * (RECENT - age / seen.tokens)
        scores = scores.where((index >= middle) | (index >= length), self._ranks(seen))
        sinks = CERTAIN * (SINK + (self.sinks - index) / max(1, self.sinks))
        return scores.where((index >= self.sinks) | (partitions < 2), sinks)

    def _ranks(self, seen: Observation) -> Tensor:
        """The place of each token in its partition, 0 … 1, worst first. [kv_heads, n]"""
        ranks = seen.keys.new_zeros(seen.kv_heads, seen.tokens, dtype=torch.float32)
        count = (seen.tokens - self.sinks) // self.lag - 1  # partitions with one after them
        if count > 0:
            spread = self._spread(seen.keys, count) + self._spread(seen.values, count)
            order = best_first(spread.flatten(0, 1))
            place = self.lag - 1 - inverse(order).view(len(ranks), -1)
            ranks[:, self.sinks : self.sinks + place.shape[1]] = place / self.lag
        return ranks

    def _spread(self, x: Tensor, count: int) -> Tensor:
        """Softmax, within partitions, of the deviation over scaled channels. [kv_heads, count, lag]"""
        end = self.sinks + (count + 1) * self.lag
        parts = x[:, self.sinks : end].float().unflatten(1, (count + 1, self.lag))
        low, high = parts[:, 1:].aminmax(dim=2, keepdim=True)
        span = high - low
        scaled = ((parts[:, :-1] - low) / span).masked_fill_(span == 0, 0.0)
        return scaled.std(-1).softmax(-1)
