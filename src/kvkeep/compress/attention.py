"""What a layer's own attention says about its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.kernels.dispatch import column_mass
from kvkeep.kernels.torch.reference import probabilities, total
from kvkeep.types import NOWHERE, Observation


def attention(seen: Observation, last: int) -> Tensor:
    """Attention of the last queries over all tokens, causal, exactly as the model computed it.

    -> [kv_heads, group, min(last, queries), n] float32
    """
    queries = seen.queries[:, -last:]
    last = queries.shape[1]
    blind = seen.cursor > min(seen.lengths)  # tokens are gone, perhaps all that an older query could see
    return probabilities(queries, seen.keys, visible(seen, last), seen.scale, seen.softcap, seen.sinks, blind)


def received(seen: Observation, last: int) -> Tensor:
    """What the last queries together give each token, averaged over the group. [kv_heads, n] float32"""
    queries = seen.queries[:, -last:]
    if not column_mass.fast(queries, seen.keys):
        return total(attention(seen, last))
    return column_mass(queries, seen.keys, seen.positions, seen.cursor, seen.scale, seen.softcap, seen.sinks)


def visible(seen: Observation, last: int) -> Tensor:
    """Which of the newest tokens each of the last queries may look at; older ones are seen by all of them.

    With equal heads only the last `last` tokens can be too new for one of these queries. [kv_heads, last, m] bool
    """
    newest = seen.positions if len(set(seen.lengths)) > 1 else seen.positions[:, -last:]
    queries = torch.arange(seen.cursor - last, seen.cursor, device=newest.device)
    return newest[:, None, :] <= queries[:, None]


def value_sizes(seen: Observation) -> Tensor:
    """Squared length of each token's value. [kv_heads, n] float32"""
    kind = torch.promote_types(seen.values.dtype, torch.float32)
    return torch.linalg.vector_norm(seen.values, dim=-1, dtype=kind).square().float()


def real(seen: Observation) -> Tensor:
    """Which entries are tokens and not padding. [kv_heads, n] bool"""
    return seen.positions != NOWHERE


def from_end(seen: Observation) -> Tensor:
    """Each token's distance to the end of its head's tokens: 0 for the newest, negative for padding. [kv_heads, n]"""
    index = torch.arange(seen.tokens, device=seen.positions.device)
    if len(set(seen.lengths)) == 1:
        return (seen.lengths[0] - 1 - index).expand(seen.kv_heads, -1)
    return torch.tensor(seen.lengths, device=index.device)[:, None] - 1 - index


def mean_and_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Over the rows of [.., w, n]: [.., n] twice; the sample variance, nought for a single row.

    Sums are products with a row of ones: much faster on a processor than reducing a middle axis.
    """
    w = rows.shape[-2]
    mean = rows.new_full((1, w), 1 / w) @ rows
    variance = rows.new_full((1, w), 1 / max(1, w - 1)) @ (rows - mean).square_()
    return mean.squeeze(-2), variance.squeeze(-2)
