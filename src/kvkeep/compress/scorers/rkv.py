"""Tokens the newest queries attend to, less so if other keys are like theirs: R-KV (arXiv:2505.24133), for reasoning.

Redundancy is a key's mean cosine to the other keys of its head, softmaxed. Of keys that are alike the most recent one
is spared: those before it do not count against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.arguments import Checked, Cosine, Odd, Positive, Share
from kvkeep.compress.attention import attention_received, distance_from_end, pool, token_mask
from kvkeep.compress.guard import effective_window
from kvkeep.types import Observation

COMPARED = 2**26  # cosines at a time


@dataclass(frozen=True)
class RKVScorer(Checked):
    window: Positive = 8
    pool: Odd = 7
    importance: Share = 0.1  # of the score, the rest is redundancy
    alike: Cosine = 0.5
    signed, one_scale, per_head = True, False, True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = max(1, effective_window(self.window, budget))
        attended = attention_received(seen, window) / min(window, seen.queries.shape[1])
        among = distance_from_end(seen) >= effective_window(self.window, budget)
        redundant = redundancy(seen.keys, token_mask(seen), self.alike)
        return self.importance * pool(attended, among, self.pool, "max") - (1 - self.importance) * redundant


def redundancy(keys: Tensor, tokens: Tensor, alike: float) -> Tensor:
    """[kv_heads, n, dim], [kv_heads, n] -> [kv_heads, n] float32"""
    unit, (heads, n) = normalize(keys.float(), dim=-1) * tokens[..., None], tokens.shape
    rows, place = max(1, COMPARED // (heads * n)), torch.arange(n, device=keys.device)
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
