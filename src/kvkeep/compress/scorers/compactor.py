"""Keys that others cannot stand for, and that their own neighbourhood attends to: Compactor (arXiv:2507.08143).

Leverage: how much of a head's keys, without their rotation and projected to a few random directions, a key alone
accounts for. Attention: within chunks, without order or scale. Both are standardized over the layer and added; the more
is removed, the more leverage counts. No question is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import AboveZero, Checked, Positive, Seed
from kvkeep.compress.attention import PromptScores, gram, layer_seed, new_chunks, norms, token_mask, uniform
from kvkeep.compress.budget.coverage import CERTAIN
from kvkeep.kernels.dispatch import chunk_mass
from kvkeep.kernels.torch.scoring import pool
from kvkeep.types import Observation


@dataclass(frozen=True)
class CompactorScorer(Checked):
    sketch: Positive = 48
    seed: Seed = 0
    ridge: AboveZero = 0.01
    signed = True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        received, tokens = seen.token_state[..., 0], token_mask(seen)
        attention = pool(received * norms(seen.values).float() * tokens, tokens, 3)
        removed = max(0.0, 1 - budget / seen.seq_len)
        scores = removed * standardized(self._leverage(seen, tokens), tokens) + standardized(attention, tokens)
        return scores.where(received > 0, CERTAIN)  # generated tokens are not scored

    def _leverage(self, seen: Observation, tokens: Tensor) -> Tensor:
        """x (XᵀX + ridge)⁻¹ xᵀ of each key x, centred and projected. [kv_heads, n]"""
        real = tokens[..., None]
        by = -seen.token_positions.where(tokens, 0)
        by = by[0] if min(seen.lengths) == seen.seq_len else by  # nothing was evicted
        keys = seen.rotate(seen.keys, by, torch.float32)
        x = keys @ self.directions(keys.shape[-1], seen.layer, keys.device)
        mean = (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp_min(1)
        x = (x - mean) * real
        products = gram(x)
        products.diagonal(dim1=1, dim2=2).add_(self.ridge)
        return torch.linalg.vecdot(x @ torch.linalg.inv(products).float(), x)

    def directions(self, dim: int, layer: int, device: torch.device) -> Tensor:
        """Normal numbers, the same on every device, of variance 1/sketch. [dim, sketch]"""
        drawn = uniform(layer_seed(self.seed, layer), torch.arange(dim * self.sketch, device=device))
        return (torch.erfinv(2 * drawn - 1) * math.sqrt(2 / self.sketch)).float().view(dim, self.sketch)


@dataclass(frozen=True)
class ChunkAttention(PromptScores):
    """token_state [kv_heads, n, 1]: attention that a token of a prompt gets from its chunk's queries, on average."""

    chunk: Positive = 256
    rotates = True

    def scores(self, seen: Observation) -> Tensor:
        """Column sums of softmax(queries keysᵀ), averaged over the group. [kv_heads, new]"""
        chunks = new_chunks(seen, self.chunk, together=True)
        return torch.cat([chunk_mass(queries, keys, size) for _, size, queries, keys in chunks], 1)


def standardized(scores: Tensor, tokens: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over the layer's tokens."""
    count = tokens.sum()
    centred = (scores - (scores * tokens).sum() / count) * tokens
    return centred / (centred.square().sum() / count).sqrt().clamp_min(1e-12)
