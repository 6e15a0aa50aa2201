"""Units of tokens that are kept or evicted together: (Observation, scores, free) -> Units.

`free` marks the tokens that compete; those always kept do not count for a unit's score.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from kvkeep.arguments import AboveZero, Checked, Positive, Range, Seed
from kvkeep.compress.attention import outlier_degree, token_mask
from kvkeep.errors import BadParameter
from kvkeep.kernels.dispatch import assign, means
from kvkeep.kernels.torch.ranking import Units, best_first
from kvkeep.types import Observation

MAX_RANGES, RANGE_TOKENS = 500, 16  # defaults
Kind = Literal["both", "chunks", "lsh"]
Worth = Literal["mean", "sum"]


@dataclass(frozen=True)
class Blocks(Checked):
    """Contiguous blocks of equal size, scored by the sum of their tokens."""

    size: Positive = 16
    name: str = "block"
    usual: int = 16  # up to this size a shorter text is one block; larger sizes raise
    per_head = True

    def __call__(self, seen: Observation, scores: Tensor, free: Tensor) -> Units:
        if self.size > max(self.usual, seen.tokens):
            raise BadParameter(f"{self.name}={self.size} is larger than the text: {seen.tokens} tokens; use fewer.")
        unit = seen.once(("blocks", self.size), lambda: torch.arange(seen.tokens, device=scores.device) // self.size)
        unit = unit.expand_as(scores)
        return Units.summed(unit, scores * free, -(-seen.tokens // self.size))


@dataclass(frozen=True)
class Prototypes(Checked):
    """Clusters of keys around prototypes: hashed outliers and ranges of text (ProtoKV).

    A cluster scores the mean of its tokens (Algorithm 1) or their sum (equation 11), the window's tokens included.
    Deviations: by default there are `n // 16` ranges, at most the paper's 500, which is meant for texts of 5-15K
    tokens; their sizes differ by at most one, where the paper cuts all to `n // v` and leaves a remainder.
    """

    kappa: Positive = 5
    anchors: Positive = 32
    bits: Annotated[int, Range(1, 16)] = 2
    chunks: Positive | None = None  # ranges of text; None: one per 16 tokens, 500 at most
    gamma: AboveZero | None = None
    kind: Kind = "both"  # "chunks": no anchors; "lsh": every token is hashed and its bucket is its cluster
    seed: Seed = 0
    buckets: Positive | None = None  # for anchors; None: 2 ** bits
    worth: Worth = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buckets is not None and self.buckets > 2**self.bits:
            raise BadParameter(
                f"buckets={self.buckets!r}: bits={self.bits} gives {2**self.bits}; use 1 to {2**self.bits}, "
                "or more bits."
            )

    @property
    def num_buckets(self) -> int:
        """Buckets of anchors: the paper's u."""
        if self.kind == "chunks":
            return 0
        return 2**self.bits if self.buckets is None else self.buckets

    def num_ranges(self, n: int) -> int:
        """Ranges of a text of n tokens: the paper's v. Never 0."""
        return max(1, min(MAX_RANGES, n // RANGE_TOKENS) if self.chunks is None else min(self.chunks, n))

    def num_clusters(self, seen: Observation) -> int:
        """Clusters of the longest head, empty ones included."""
        return self.num_buckets + max(map(self.num_ranges, seen.lengths))

    def __call__(self, seen: Observation, scores: Tensor, free: Tensor) -> Units:
        member = seen.memoize(replace(self, worth="mean"), lambda: self.members(seen))
        counted = token_mask(seen).to(scores.dtype)
        total, size = (
            scores.new_zeros(len(scores), self.num_clusters(seen)).scatter_add(1, member, x)
            for x in (scores * counted, counted)
        )
        return Units(member, total if self.worth == "sum" else total / size.clamp_min(1))

    def members(self, seen: Observation) -> Tensor:
        """The cluster of every token: buckets first, then ranges. [kv_heads, n]"""
        keys, tokens = seen.keys, token_mask(seen)
        if self.kind == "lsh":
            return self._all_hashed(seen)
        initial = self.num_buckets + self._ranges(seen)
        if self.kind == "both":
            ranked = best_first(outlier_degree(seen, self.kappa).masked_fill(~tokens, float("-inf")))
            anchor = torch.zeros_like(tokens).scatter(1, ranked[:, : self.anchors], True) & tokens
            initial = torch.where(anchor, self._hashes(keys, self.bits) % self.num_buckets, initial)
        count = self.num_clusters(seen)
        return assign(keys, *means(keys, initial.masked_fill(~tokens, count), count))

    def _all_hashed(self, seen: Observation) -> Tensor:
        """The ablation: every token is hashed, into as many buckets as there are clusters otherwise. [kv_heads, n]"""
        counts = [self.num_buckets + self.num_ranges(n) for n in seen.lengths]
        rows = zip(seen.keys, counts, strict=True)
        return torch.stack([self._hashes(keys, (count - 1).bit_length()) % count for keys, count in rows])

    def _hashes(self, keys: Tensor, bits: int) -> Tensor:
        """Signs of random Fourier features as the bits of an integer. [.., n]"""
        source = torch.Generator().manual_seed(self.seed)
        keys = keys.float()
        dim = keys.shape[-1]
        gamma = dim**-0.5 if self.gamma is None else self.gamma
        weights = torch.randn(bits, dim, generator=source) * gamma
        phase = torch.rand(bits, generator=source) * 2 * torch.pi
        signs = (keys @ weights.to(keys.device).t() + phase.to(keys.device)).cos() > 0
        return (signs.long() << torch.arange(bits, device=keys.device)).sum(-1)

    def _ranges(self, seen: Observation) -> Tensor:
        """Contiguous ranges of a head's tokens, of sizes as equal as possible. [kv_heads, n]"""
        index = torch.arange(seen.tokens, device=seen.keys.device)
        rows = []
        for n in seen.lengths:
            count = self.num_ranges(n)
            rows.append((index * count // max(1, n)).clamp_max(count - 1))
        return torch.stack(rows)
