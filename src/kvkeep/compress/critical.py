"""Part of the budget by score, the rest by what a token would add to the hidden states (arXiv:2502.03805).

Attention says how much of a value is read; what it changes is that share of W_O v. So a scorer's favourites are kept
first, and the others compete by (score + offset) · ‖W_O v‖₁, averaged over the query heads of a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import Amount, Checked, Share
from kvkeep.kernels.torch.ranking import best_first, inverse
from kvkeep.types import Observation

FAVOURITE = 1e30  # scores from here on are of those kept first
BLOCK = 2**24  # numbers of W_O v held at a time


@dataclass(frozen=True)
class Critical(Checked):
    share: Share = 0.5
    offset: Amount = 1e-4

    def __call__(self, seen: Observation, scores: Tensor, free: Tensor, left: Tensor) -> Tensor:
        assert seen.output_weight is not None
        order = inverse(best_first(scores.masked_fill(~free, -torch.inf)))
        favourites = free & (order < (self.share * left.double()).floor()[:, None])
        first = FAVOURITE * (1 + scores / scores.amax(1, keepdim=True).clamp_min(1e-30))
        return first.where(favourites, (scores + self.offset) * output_norms(seen.values, seen.output_weight))


def output_norms(values: Tensor, output_weight: Tensor) -> Tensor:
    """‖W_O v‖₁, averaged over the group. [kv_heads, n]

    values [kv_heads, n, dim], output_weight [heads, hidden, dim]
    """
    weight = output_weight.to(torch.promote_types(values.dtype, torch.float32))
    heads, hidden, _ = weight.shape
    grouped = weight.unflatten(0, (len(values), -1)).transpose(2, 3)
    parts = values.to(weight.dtype).split(max(1, BLOCK // (heads * hidden)), 1)
    return torch.cat([(part[:, None] @ grouped).abs().sum(-1).mean(1) for part in parts], 1).float()
