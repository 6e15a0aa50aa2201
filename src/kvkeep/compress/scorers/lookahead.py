"""Attention of queries that come after the text: those of a draft of the answer (Lookahead Q-Cache, arXiv:2505.20334).

A few tokens are decoded from what a cheap method keeps of the text; their queries, or those that predict them
(`Draft.predicting`), look for what the answer needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.compress.attention import attention, check_norm, distance_from_end, token_mask
from kvkeep.compress.guard import check_window, effective_window
from kvkeep.compress.pooling import pool
from kvkeep.errors import BadParameter
from kvkeep.kernels.torch.reference import probabilities
from kvkeep.types import Observation


@dataclass(frozen=True)
class LookaheadScorer:
    """As SnapKV, but every query sees every token; the text's last `window` tokens are kept.

    In decode, where there is no draft, the newest queries score, and see what is before them.
    """

    window: int = 64
    pool: int = 5
    pooling: str = "avg"
    norm: int = 1  # of all queries' attention to a token: 1 or 2; 0: the most counts
    per_head = True

    def __post_init__(self) -> None:
        check_window(self.window, self.pool)
        if self.pooling not in ("avg", "max"):
            raise BadParameter(f"pooling='{self.pooling}' is not known; use 'avg' or 'max'.")
        check_norm(self.norm)

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        window = effective_window(self.window, budget)
        rows = attention(seen, max(1, window)) if seen.is_step else self._draft_attention(seen)
        return pool(self._votes(rows), distance_from_end(seen) >= window, self.pool, self.pooling)

    def _draft_attention(self, seen: Observation) -> Tensor:
        visible = token_mask(seen)[:, None].expand(-1, seen.queries.shape[1], -1)
        return probabilities(seen.queries, seen.keys, visible, seen.scale, seen.softcap, seen.sink_logits)

    def _votes(self, rows: Tensor) -> Tensor:
        """[kv_heads, group, queries, n] -> [kv_heads, n]"""
        if self.norm == 0:
            return rows.amax((1, 2))
        return rows.mean((1, 2)) if self.norm == 1 else rows.square().mean((1, 2)).sqrt()
