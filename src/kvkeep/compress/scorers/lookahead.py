"""Attention of queries that come after the text: those of a draft of the answer (Lookahead Q-Cache, arXiv:2505.20334).

A few tokens are decoded from what a cheap method keeps of the text; their queries, or those that predict them
(`Draft.predicting`), look for what the answer needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvkeep.arguments import Checked, Odd, Positive
from kvkeep.compress.attention import attention, distance_from_end, pool, token_mask
from kvkeep.compress.guard import effective_window
from kvkeep.kernels.torch.scoring import probabilities
from kvkeep.types import Observation


@dataclass(frozen=True)
class LookaheadScorer(Checked):
    """SnapKV's scores, but every query sees every token; the text's last `window` tokens are kept.

    In decode, where there is no draft, the newest queries score, and see what is before them.
    """

    window: Positive = 64
    pool: Odd = 5
    pooling: Literal["avg", "max"] = "avg"
    norm: Literal[0, 1, 2] = 1  # of all queries' attention to a token: 1 or 2; 0: the most counts
    per_head = True

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
