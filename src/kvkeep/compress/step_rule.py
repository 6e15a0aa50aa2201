"""What a decode step evicts: one token of every KV head, of all rows and layers at once.

Pure tensors in and out, and nothing waits for the host: it runs within a CUDA graph (cache/evict_one.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.compress.budget.heads import EqualHeads
from kvkeep.compress.budget.layers import EqualLayers
from kvkeep.compress.method import Method
from kvkeep.compress.positions import PlacementInput, move_within
from kvkeep.compress.protocols import ScorerTraits, StepMemory, StepScorer
from kvkeep.types import PAD_POSITION, Budget, Step


@dataclass
class StepRule:
    """The rule of methods whose scorer has `step`, with equal heads and layers; for others, `scorer` is None."""

    method: Method
    budget: Budget
    context_length: int
    in_place: bool = True

    def __post_init__(self) -> None:
        method, budget = self.method, self.budget.value
        self.tokens = budget if self.in_place and isinstance(budget, int) else 0  # 0: nothing, or a fraction
        self.memory = method.memory if self.tokens and isinstance(method.memory, StepMemory) else None
        # token state is made of attention, even where the scorer itself needs none
        self.needs_attention = method.memory is not None or ScorerTraits.of(method.scorer).needs_attention
        one_by_one = (
            not (method.group or method.rerank) and method.reuse == 1 and (method.memory is None or self.memory)
        )
        equal = isinstance(method.heads, EqualHeads) and isinstance(method.layers, EqualLayers)
        supported = self.tokens and one_by_one and equal
        self.scorer = method.scorer if supported and isinstance(method.scorer, StepScorer) else None

    @property
    def evicts(self) -> bool:
        """Whether every step evicts one token of each full KV head."""
        return self.scorer is not None and self.method.schedule.every == 1

    @property
    def moved_sinks(self) -> int:
        """Sinks whose keys move with every token evicted."""
        return self.method.guard.sinks if self.evicts and self.method.placement else 0

    def update_token_state(self, step: Step) -> Step:
        return replace(step, token_state=self.memory.step(step, self.tokens)) if self.memory else step

    def lowest_scored(self, step: Step) -> Tensor:
        """The slot of each KV head's token to evict; of equal scores, the earliest. [rows, kv_heads]"""
        assert self.scorer is not None
        scores = self.scorer.step(step, self.tokens).float()
        scores = scores.masked_fill(self.method.guard.step(step, self.tokens), float("inf"))
        lowest = scores <= scores.amin(-1, keepdim=True)
        return torch.where(lowest, step.token_positions, PAD_POSITION).argmin(-1)

    def sink_positions(self, lengths: Tensor) -> Tensor:
        """RoPE positions of the sinks of rows that have evicted, after so many tokens. [rows] -> [rows, sinks]"""
        sinks, placement = self.moved_sinks, self.method.placement
        assert placement is not None
        recent = torch.arange(sinks - self.tokens, 0, device=lengths.device) + lengths[:, None]
        kept = torch.cat([torch.arange(sinks, device=lengths.device).expand(len(lengths), -1), recent], 1)
        where = PlacementInput(kept, lengths[:, None], self.tokens, self.context_length)
        positions = move_within(placement(where), lengths[:, None] + 1 - self.context_length)
        return positions[:, :sinks].to(torch.int32)
