"""Keys unlike the mean direction of all keys of their head: KeyDiff (arXiv:2504.15364). No query is needed.

1 - cosine instead of the paper's -cosine: the same order, and no negative scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.compress.attention import token_mask
from kvkeep.types import Observation


@dataclass(frozen=True)
class KeyDiffScorer:
    def cache_key(self, budget: int) -> int:
        return 1

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        unit = normalize(seen.keys.float(), dim=-1)
        mean = normalize((unit * token_mask(seen)[..., None]).sum(1), dim=-1)
        return 1 - torch.linalg.vecdot(unit, mean[:, None])
