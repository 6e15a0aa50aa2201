"""Ranking and selecting the tokens of all heads: keys packed for one sort, and what is read off its order.

The fused copy of torch/ranking.py; nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, kernel, pow2
from kvkeep.kernels.triton.tiles import sortable

BLOCK = 1024  # tokens per program
SCANNED = 4096  # tokens per iteration of a program that scans a whole head


def ranks(scores, forced=None, token_mask=None, member=None, unit_scores=None):
    """Do what the reference does. scores [kv_heads, n] float32"""
    (rows, n), scores = scores.shape, scores.contiguous()
    keys = torch.empty(rows * n, dtype=torch.int64, device=scores.device)
    unit_rank = keys if unit_scores is None else ranks(unit_scores)
    member, forced_mask, token_mask_ = _rows(member, keys), _rows(forced, keys), _rows(token_mask, keys)
    _pack[cdiv(n, BLOCK), rows](
        scores, forced_mask, token_mask_, member, unit_rank, keys, n, forced_mask.stride(0), token_mask_.stride(0),
        member.stride(0), 0 if unit_scores is None else unit_scores.shape[1], forced is not None,
        token_mask is not None, unit_scores is not None, BLOCK, num_warps=4,
    )  # fmt: skip
    order, rank = keys.sort(stable=True).indices, torch.empty(rows, n, dtype=torch.int64, device=scores.device)
    _places[cdiv(n, BLOCK), rows](order, rank, n, BLOCK, num_warps=4)
    return rank


def _rows(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """Give each tensor a last stride of 1, and a mask as bytes."""
    if tensor is None:
        return instead
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def top_counts(scores, rank, floor, total, member, unit_scores):
    """Do what the reference does. -> [kv_heads] int64"""
    (heads, n), scores = scores.shape, scores.contiguous()
    keys = torch.empty(heads * n, dtype=torch.int64, device=scores.device)
    member, units = _rows(member, keys), scores if unit_scores is None else unit_scores.contiguous()
    _pack_shared[cdiv(n, BLOCK), heads](
        scores, rank, floor, member, units, keys, n, member.stride(0), units.shape[1], unit_scores is not None, BLOCK,
        num_warps=4,
    )  # fmt: skip
    order, counts = keys.sort(stable=True).indices, torch.empty(heads, dtype=torch.int64, device=scores.device)
    _count[heads,](order, counts, total, SCANNED, num_warps=8)
    return counts


def places_of(rank, counts, total):
    """Do what the reference does. -> [2, total] int64"""
    heads, n = rank.shape
    places = torch.empty(2, total, dtype=torch.int64, device=rank.device)
    _places_of[heads,](rank, counts, places, n, total, pow2(heads), SCANNED, num_warps=8)
    return places


@kernel(do_not_specialize=["n", "forced_row", "token_row", "member_row", "units"])
def _pack(
    scores, forced, token_mask, member, unit_rank, keys, n, forced_row, token_row, member_row, units,
    FORCED: tl.constexpr, PADDED: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row, tier, descending score; backwards, so that a stable sort gives ties to the later token."""
    row, tokens = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = tokens < n
    key = 4294967295 - sortable(tl.load(scores + row * n + tokens, mask=valid, other=0.0))
    tier = tl.full([BLOCK], 1, tl.int64)
    if UNITS:
        unit = tl.load(member + row * member_row + tokens, mask=valid, other=0)
        tier += tl.load(unit_rank + row * units + unit, mask=valid, other=0)
    if FORCED:
        tier = tl.where(tl.load(forced + row * forced_row + tokens, mask=valid, other=0) != 0, 0, tier)
    if PADDED:
        tier = tl.where(tl.load(token_mask + row * token_row + tokens, mask=valid, other=0) != 0, tier, 1048575)
    tl.store(keys + row * n + n - 1 - tokens, (row << 52) + (tier << 32) + key, mask=valid)


@kernel(do_not_specialize=["n"])
def _places(order, rank, n, BLOCK: tl.constexpr):
    """The place of each token in its row's part of the order."""
    row, places = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = places < n
    token = n - 1 - (tl.load(order + row * n + places, mask=valid, other=0) - row * n)
    tl.store(rank + row * n + token, places.to(tl.int64), mask=valid)


@kernel(do_not_specialize=["n", "member_row", "units"])
def _pack_shared(
    scores, rank, floor, member, unit_scores, keys, n, member_row, units, UNITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Token by token, heads in descending order, all backwards: ties go to the later token, then the lower head."""
    head, tokens = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    heads, valid, inf = tl.num_programs(1), tokens < n, float("inf")
    score = tl.load(scores + head * n + tokens, mask=valid, other=0.0)
    place = tl.load(rank + head * n + tokens, mask=valid, other=0)
    is_reserved = (place < tl.load(floor + head).to(tl.int64)) & (score > -inf)
    key = 4294967295 - sortable(tl.where(is_reserved, inf, score))
    if UNITS:
        at = tl.load(member + head * member_row + tokens, mask=valid, other=0)
        unit = tl.load(unit_scores + head * units + at, mask=valid, other=0.0)
        unit = tl.where(is_reserved, inf, tl.where(score == -inf, -inf, unit))
        key = ((2147483647 - sortable(unit)) << 32) | key
    tl.store(keys + (n - 1 - tokens).to(tl.int64) * heads + head, key, mask=valid)


@kernel(do_not_specialize=["total"])
def _count(order, counts, total, BLOCK: tl.constexpr):
    """How many of the first `total` of all heads are this head's."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    found = tl.zeros([BLOCK], tl.int64)
    for start in range(0, total, BLOCK):
        places = start + tl.arange(0, BLOCK)
        place = tl.load(order + places, mask=places < total, other=0)
        found += ((place % heads == head) & (places < total)).to(tl.int64)
    tl.store(counts + head, tl.sum(found, 0))


@kernel(do_not_specialize=["n", "total"])
def _places_of(rank, counts, places, n, total, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Head and index of every token whose rank is below its head's count, in ascending order."""
    head = tl.program_id(0).to(tl.int64)
    before = tl.arange(0, HEADS)
    slot = tl.sum(tl.load(counts + before, mask=before < head, other=0), 0)
    count = tl.load(counts + head)
    for start in range(0, n, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        kept = (tl.load(rank + head * n + tokens, mask=tokens < n, other=9223372036854775807) < count).to(tl.int32)
        where = slot + tl.cumsum(kept, 0) - 1
        tl.store(places + where, head, mask=kept != 0)
        tl.store(places + total + where, tokens.to(tl.int64), mask=kept != 0)
        slot += tl.sum(kept, 0).to(tl.int64)
