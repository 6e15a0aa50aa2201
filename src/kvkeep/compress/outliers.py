"""Outlier degree of each key among its neighbours: tokens with most of the attention stand out in key space (ProtoKV).

Deviation: the paper's equation 5 has the opposite sign; its text and figures mean "dissimilar = high degree".
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.compress.attention import token_mask
from kvkeep.kernels.dispatch import key_similarity
from kvkeep.types import Observation


def outlier_degree(seen: Observation, kappa: int) -> Tensor:
    """(mean(S) - S) / std(S), S the mean cosine of a key with its neighbours up to kappa away, itself included.

    -> [kv_heads, n], 0 where all keys are equally similar
    """
    tokens = token_mask(seen)
    similarity = key_similarity(seen.keys, tokens, kappa)
    n = tokens.sum(1, keepdim=True)
    mean = (similarity * tokens).sum(1, keepdim=True) / n
    std = (((similarity - mean) ** 2) * tokens).sum(1, keepdim=True).div(n).sqrt()
    return torch.where(std > 1e-7, (mean - similarity) / std.clamp_min(1e-7), 0.0)
