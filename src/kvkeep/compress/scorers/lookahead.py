"""Attention of queries that come after the text: those of a draft of the answer (Lookahead Q-Cache, arXiv:2505.20334).

A few tokens are decoded from what a cheap method keeps of the text; their queries look for what the answer needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.attention import distance_from_end, token_mask
from kvkeep.compress.guard import check_window, effective_window
from kvkeep.compress.pooling import pool
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.reference import probabilities
from kvkeep.types import Observation


@dataclass(frozen=True)
class LookaheadScorer:
    """As SnapKV, but every query sees every token; the text's last `window` tokens are kept."""

    window: int = 64
    pool: int = 5
    pooling: str = "avg"
    per_head = True

    def __post_init__(self) -> None:
        check_window(self.window, self.pool)
        if self.pooling not in ("avg", "max"):
            raise BadParameter(f"pooling='{self.pooling}' is not known; use 'avg' or 'max'.")

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        visible = token_mask(seen)[:, None].expand(-1, seen.queries.shape[1], -1)
        rows = probabilities(seen.queries, seen.keys, visible, seen.scale, seen.softcap, seen.sink_logits)
        among = distance_from_end(seen) >= effective_window(self.window, budget)
        return pool(rows.mean((1, 2)), among, self.pool, self.pooling)
