"""Eviction at every decode step by the votes of a row's newest queries (SnapKV), in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.kernels.torch.ranking import ranks, top_counts
from kvkeep.kernels.torch.scoring import pool, probabilities, sum_over_queries


class VoteRule(NamedTuple):
    """How many tokens are kept, and how they are scored."""

    budget: int  # tokens of a row per KV head, on average
    sure: int  # that every KV head keeps in any case
    window: int  # newest queries, which vote for what is before them; votes are pooled among those tokens
    sinks: int  # first tokens that are always kept
    recent: int  # last tokens that are, `window` at least
    pool: int
    pooling: str  # "avg", "max"


def evict_voted(
    keys: Tensor,
    values: Tensor,
    order: Tensor,
    positions: Tensor,
    starts: Tensor,
    lengths: Tensor,
    queries: Tensor,
    seen: Tensor,
    lse: Tensor,
    known: Tensor,
    longest: int,
    rule: VoteRule,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> None:
    """Bring every row that is full and has one token more of each KV head back to its budget, in place.

    A KV head's tokens lie in its span in any order, without gaps, the newest last: what that one's `order` and
    `positions` are, is written first.
    keys and values [slots, dim]; order, positions [slots] int32: which token of its KV head lies here, and its position
    starts, lengths [rows, kv_heads]: of the spans, empty in rows that are not in use; longest: of all, or more
    queries [rows, ring + 1, heads, dim]: that of position p is at p % ring; seen [rows]: tokens of text so far
    lse [rows, heads, ring + 1]: log-sum-exps of their logits; known [rows, kv_heads] int32: 1 where they are right, if
    the last call evicted from here and that of the query since then was written, and 0 at first. They save the kernel
    a pass over the keys, and it keeps both up to date; here they are neither read nor written.
    """
    ring, sure = queries.shape[1] - 1, torch.full(starts.shape[1:], rule.sure, device=starts.device)
    ages = torch.arange(rule.window - 1, -1, -1, device=keys.device)
    for row, held in enumerate(lengths.tolist()):
        if not sum(held):
            continue
        newest = starts[row] + lengths[row] - 1
        order[newest], positions[newest] = (lengths[row] - 1).int(), (seen[row] - 1).int()
        if sum(held) <= len(held) * rule.budget:
            continue
        index = torch.arange(max(held), device=keys.device)
        age = lengths[row][:, None] - 1 - index
        slots = (starts[row][:, None] + index).clamp_max(len(keys) - 1)
        slots = slots.gather(1, order[slots].masked_fill(age < 0, max(held)).argsort(1))  # in order
        voting = queries[row, (seen[row] - 1 - ages) % ring].transpose(0, 1)
        visible = age[:, None] >= ages[:, None]
        votes = sum_over_queries(probabilities(voting, keys[slots], visible, scale, softcap, sink_logits))
        votes = pool(votes, age >= rule.window, rule.pool, rule.pooling)
        votes, forced = votes.masked_fill(age < 0, -torch.inf), (age < rule.recent) | (index < rule.sinks)
        rank = ranks(votes, forced & (age >= 0), age >= 0)
        counts = top_counts(votes, rank, sure, len(held) * rule.budget, None, None)
        for head, start in enumerate(starts[row].tolist()):
            kept = slots[head, rank[head] < counts[head]]
            mine = slice(start, start + len(kept))
            keys[mine], values[mine], positions[mine] = keys[kept], values[kept], positions[kept]
            order[mine] = index[: len(kept)].int()
        lengths[row] = counts
