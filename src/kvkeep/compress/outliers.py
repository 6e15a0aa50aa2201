"""How unlike its neighbours each key is: the tokens that hold most of the attention stand out in key space (ProtoKV).

Deviation: the paper's equation 5 has the opposite sign; its text and figures mean "unlike = high degree".
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.compress.attention import real
from kvkeep.kernels.dispatch import likeness
from kvkeep.types import Observation


def outlier_degree(seen: Observation, kappa: int) -> Tensor:
    """(mean(S) - S) / std(S), S the mean cosine of a key with its neighbours up to kappa away, itself included.

    -> [kv_heads, n], zero where all keys are equally alike
    """
    tokens = real(seen)
    alike = likeness(seen.keys, tokens, kappa)
    n = tokens.sum(1, keepdim=True)
    mean = (alike * tokens).sum(1, keepdim=True) / n
    spread = (((alike - mean) ** 2) * tokens).sum(1, keepdim=True).div(n).sqrt()
    return torch.where(spread > 1e-7, (mean - alike) / spread.clamp_min(1e-7), 0.0)
