"""What scorers and layer budgets share: statistics of a layer's attention, keys and values, and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.arguments import Checked
from kvkeep.kernels.dispatch import column_mass, key_similarity
from kvkeep.kernels.torch.scoring import probabilities, sum_over_queries
from kvkeep.types import PAD_POSITION, Observation

GRAM_BLOCK = 1024  # tokens whose products are summed in float32


class PromptScores(Checked):
    """A memory that scores a prompt's tokens once, in the pass that brings them. token_state [kv_heads, n, 1]"""

    width, sees_all, prompt_only = 1, True, True

    def __call__(self, seen: Observation, budget: int) -> Tensor:
        if seen.is_step:
            return seen.token_state
        scores = seen.memoize(self, lambda: self.scores(seen))
        return seen.token_state.scatter(1, seen.newest[..., None], scores.clamp_min(1e-30)[..., None])

    def scores(self, seen: Observation) -> Tensor:
        """Scores of this pass's tokens, more than 0. [kv_heads, new]"""
        raise NotImplementedError


def any_budget(scorer: Any, budget: int) -> int:
    """The `cache_key` of a scorer whose scores are the same for every budget."""
    return 1


def attention(seen: Observation, last: int) -> Tensor:
    """Causal attention of the last queries over all tokens, exactly as the model computes it.

    -> [kv_heads, group, min(last, queries), n] float32
    """
    queries = seen.queries[:, -last:]
    last = queries.shape[1]
    allowed = causal_mask(seen, last)
    evicted = seen.seq_len > min(seen.lengths)  # perhaps all an older query could see
    return probabilities(queries, seen.keys, allowed, seen.scale, seen.softcap, seen.sink_logits, evicted)


def attention_received(seen: Observation, last: int) -> Tensor:
    """Attention each token receives, summed over the last queries, averaged over the group. [kv_heads, n] float32"""
    queries = seen.queries[:, -last:]
    if not column_mass.uses_kernel(queries, seen.keys):
        return sum_over_queries(attention(seen, last))
    softmax = seen.scale, seen.softcap, seen.sink_logits
    return column_mass(queries, seen.keys, seen.token_positions, seen.seq_len, *softmax)


def causal_mask(seen: Observation, last: int) -> Tensor:
    """Mask of the newest m tokens for each of the last queries; older tokens are visible to all of them.

    With equal heads, only the last `last` tokens can be masked. [kv_heads, last, m] bool
    """
    newest = seen.token_positions if len(set(seen.lengths)) > 1 else seen.token_positions[:, -last:]
    queries = torch.arange(seen.seq_len - last, seen.seq_len, device=newest.device)
    return newest[:, None, :] <= queries[:, None]


def squared_value_norms(seen: Observation) -> Tensor:
    """Squared norm of each token's value. [kv_heads, n] float32"""
    return norms(seen.values).square().float()


def norms(vectors: Tensor) -> Tensor:
    """[.., dim] -> [..] in float32 at least"""
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.promote_types(vectors.dtype, torch.float32))


def token_mask(seen: Observation) -> Tensor:
    """True for tokens, False for padding. [kv_heads, n]"""
    return seen.once("tokens", lambda: seen.token_positions != PAD_POSITION)


def distance_from_end(seen: Observation) -> Tensor:
    """0 for the newest token of a head, 1 for the one before, …; negative for padding. [kv_heads, n]"""
    index = torch.arange(seen.tokens, device=seen.token_positions.device)
    if len(set(seen.lengths)) == 1:
        return (seen.lengths[0] - 1 - index).expand(seen.kv_heads, -1)
    return token_mask(seen).sum(1, keepdim=True) - 1 - index


def mean_and_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sample variance (0 for a single row) over the rows of [.., w, n]: [.., n] twice.

    Sums are products with a row of ones: much faster on a CPU than reducing a middle axis.
    """
    w = rows.shape[-2]
    mean = rows.new_full((1, w), 1 / w) @ rows
    variance = rows.new_full((1, w), 1 / max(1, w - 1)) @ (rows - mean).square_()
    return mean.squeeze(-2), variance.squeeze(-2)


def gram(x: Tensor) -> Tensor:
    """XᵀX, blocks of tokens by themselves first: a GPU is slow at few columns and very many rows.

    x [kv_heads, n, columns] -> [kv_heads, columns, columns] float64
    """
    size = min(GRAM_BLOCK, x.shape[1])
    if missing := -x.shape[1] % size:
        x = pad(x, (0, 0, 0, missing))
    blocks = x.unflatten(1, (-1, size))
    return (blocks.transpose(-1, -2) @ blocks).sum(1, dtype=torch.float64)


def new_chunks(seen: Observation, size: int, together: bool = False) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Position of the first token, length, queries [heads, m, dim] and keys [kv_heads, m, dim] of this pass's chunks.

    Chunks begin at multiples of their size; one that the pass cuts is shorter. together: those of one length at once
    """
    keys = seen.keys[:, seen.tokens - seen.new :]
    if seen.is_padded:
        keys = seen.keys.gather(1, seen.newest[..., None].expand(-1, -1, seen.keys.shape[-1]))
    before = seen.seq_len - seen.new
    edges = [before, *range((before // size + 1) * size, seen.seq_len, size), seen.seq_len]
    for length, chunks in groupby(pairwise(edges), lambda chunk: chunk[1] - chunk[0]):
        starts = [first for first, _ in chunks]
        for run in [starts] if together else [[first] for first in starts]:
            part = slice(run[0] - before, run[-1] + length - before)
            yield run[0], length, seen.queries[:, part], keys[:, part]


def outlier_degree(seen: Observation, kappa: int) -> Tensor:
    """How far a key stands out among its neighbours: those with most of the attention do (ProtoKV).

    (mean(S) - S) / std(S), S the mean cosine of a key with its neighbours up to kappa away, itself included. Deviation:
    the paper's equation 5 has the opposite sign; its text and figures mean "dissimilar = high degree".
    -> [kv_heads, n], 0 where all keys are equally similar
    """
    tokens = token_mask(seen)
    similarity = key_similarity(seen.keys, tokens, kappa)
    n = tokens.sum(1, keepdim=True)
    mean = (similarity * tokens).sum(1, keepdim=True) / n
    std = (((similarity - mean) ** 2) * tokens).sum(1, keepdim=True).div(n).sqrt()
    return torch.where(std > 1e-7, (mean - similarity) / std.clamp_min(1e-7), 0.0)


def uniform(seed: int, counters: Tensor) -> Tensor:
    """Random numbers in (0, 1), a hash of each counter: the same on every device and in every order. float64"""
    bits = counters.long()
    for round_ in (seed, seed >> 32):
        bits = bits + (round_ & 0xFFFFFFFF) * 0x9E3779B9 & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            bits = (bits ^ (bits >> shift)) * factor & 0xFFFFFFFF
    return (bits.double() + 0.5) / 2**32


def layer_seed(seed: int, layer: int) -> int:
    """Every layer draws its own numbers."""
    return seed + 1_000_003 * layer
