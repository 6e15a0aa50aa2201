"""How unlike its neighbours each key is: the tokens that hold most of the attention stand out in key space (ProtoKV).

Deviation: the paper's equation 5 has the opposite sign; its text and figures mean "unlike = high degree".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.compress.observe import real
from kvkeep.types import Observation


def outlier_degree(seen: Observation, kappa: int) -> Tensor:
    """(mean(S) - S) / std(S), S the mean cosine of a key with its neighbours up to kappa away, itself included.

    -> [kv_heads, n], zero where all keys are equally alike
    """
    tokens = real(seen)
    unit = normalize(seen.keys.float(), dim=-1) * tokens[..., None]
    total = (unit * _near_sum(unit, kappa)).sum(-1)
    alike = total / _near_sum(tokens[..., None].float(), kappa)[..., 0].clamp_min(1)
    count = tokens.sum(1, keepdim=True)
    mean = (alike * tokens).sum(1, keepdim=True) / count
    spread = (((alike - mean) ** 2) * tokens).sum(1, keepdim=True).div(count).sqrt()
    return torch.where(spread > 1e-7, (mean - alike) / spread.clamp_min(1e-7), 0.0)


def _near_sum(x: Tensor, reach: int) -> Tensor:
    """Sum over each token's neighbours up to `reach` away. [kv_heads, n, …]"""
    total = x.clone()
    for step in range(1, min(reach, x.shape[1] - 1) + 1):
        total[:, step:] += x[:, :-step]
        total[:, :-step] += x[:, step:]
    return total
