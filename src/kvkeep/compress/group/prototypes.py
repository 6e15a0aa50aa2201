"""Clusters of the key space around prototypes: hashed outliers and plain stretches of text (ProtoKV).

A cluster is worth the mean vote of its tokens, those of the window included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.compress.observe import real
from kvkeep.compress.outliers import outlier_degree
from kvkeep.compress.select import Units, best_first
from kvkeep.errors import BadParameter
from kvkeep.kernels.best import assign, means
from kvkeep.types import Observation


@dataclass(frozen=True)
class Prototypes:
    kappa: int = 5
    anchors: int = 32
    bits: int = 2
    chunks: int = 500
    gamma: float | None = None
    kind: str = "both"  # "chunks": no anchors; "lsh": every token is hashed and its bucket is its cluster
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kappa < 1:
            raise BadParameter(f"kappa={self.kappa}: a key needs at least one neighbour to be unlike; use 1 or more.")
        if self.anchors < 1 or self.chunks < 1:
            raise BadParameter(f"anchors={self.anchors}, chunks={self.chunks}: both must be 1 or more.")
        if not 1 <= self.bits <= 16:
            raise BadParameter(f"bits={self.bits} gives 2^{self.bits} buckets; use 1 to 16.")
        if self.gamma is not None and self.gamma <= 0:
            raise BadParameter(f"gamma={self.gamma} must be positive, or None for 1/sqrt(dim).")
        if self.kind not in ("both", "chunks", "lsh"):
            raise BadParameter(f"prototypes='{self.kind}' is not known; use 'both', 'chunks' or 'lsh'.")

    def __call__(self, seen: Observation, scores: Tensor, free: Tensor) -> Units:
        member = seen.once(self, lambda: self.members(seen))
        counted = real(seen).to(scores.dtype)
        units = int(2**self.bits + min(self.chunks, seen.tokens))
        total, count = (
            scores.new_zeros(len(scores), units).scatter_add(1, member, x) for x in (scores * counted, counted)
        )
        return Units(member, total / count.clamp_min(1))

    def members(self, seen: Observation) -> Tensor:
        """The cluster of every token: buckets first, then stretches. [kv_heads, n]"""
        keys, tokens = seen.keys, real(seen)
        bucket = self._buckets(keys.float())
        if self.kind == "lsh":
            return bucket
        stretch = 2**self.bits + self._stretches(seen)
        anchor = torch.zeros_like(tokens)
        if self.kind == "both":
            ranked = best_first(outlier_degree(seen, self.kappa).masked_fill(~tokens, float("-inf")))
            anchor = anchor.scatter(1, ranked[:, : self.anchors], True) & tokens
        home = torch.where(anchor, bucket, stretch)
        count = int(2**self.bits + min(self.chunks, seen.tokens))
        centres, size = means(keys, home.masked_fill(~tokens, count), count)
        company = (size.gather(1, home) != 1).any(0).nonzero()[:, 0]  # who is alone at home is its own prototype
        return home.index_copy(1, company, assign(keys[:, company], centres, size))

    def _buckets(self, keys: Tensor) -> Tensor:
        """Signs of random Fourier features, read as a number. [kv_heads, n]"""
        source = torch.Generator().manual_seed(self.seed)
        dim = keys.shape[-1]
        spread = dim**-0.5 if self.gamma is None else self.gamma
        weights = torch.randn(self.bits, dim, generator=source) * spread
        phase = torch.rand(self.bits, generator=source) * 2 * torch.pi
        bits = (keys @ weights.to(keys.device).t() + phase.to(keys.device)).cos() > 0
        return (bits.long() << torch.arange(self.bits, device=keys.device)).sum(-1)

    def _stretches(self, seen: Observation) -> Tensor:
        """Contiguous stretches of equal size, the last one takes the rest; one token each where tokens are few."""
        index = torch.arange(seen.tokens, device=seen.keys.device)
        rows = []
        for n in seen.lengths:
            count = max(1, min(self.chunks, n))
            rows.append((index // max(1, n // count)).clamp_max(count - 1))
        return torch.stack(rows)
