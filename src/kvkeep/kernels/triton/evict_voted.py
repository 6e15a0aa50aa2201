"""Eviction at every decode step by the votes of a row's newest queries, of all rows at once; the host knows no length.

Two passes over the keys, as in column_mass.py: every query's log-sum-exp, then each key's votes. A program of each KV
head finds its tokens of fewest votes; then one of each KV head compares those of all heads of its row, evicts its own
ones that are among the lowest, and moves its last tokens to their places. Tokens do not stay in order: `order` says
which one lies where. Rows that are not full are left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvkeep.kernels.triton.column_mass import ROWS, merge
from kvkeep.kernels.triton.common import cdiv, floats, kernel, padded, pow2
from kvkeep.kernels.triton.decode import part_of
from kvkeep.kernels.triton.tiles import LOG2E, attention_logits, copy_rows, dot, load_rows, sortable

PROGRAMS = 2048  # several for each multiprocessor of a large GPU: KV heads differ in length
SHORTEST = 128  # tokens of a KV head that are worth another program
LSE_TILE, VOTES_TILE = (64, 128, 4), (64, 64, 4)  # queries, keys, warps: the fastest on an H200
WIDE_TILE = 64, 64, 4  # of float32, or of long vectors
CHOSEN_FROM, MOVED = 1024, 256  # tokens per iteration
NONE = tl.constexpr(9223372036854775807)


def evict_voted(
    keys, values, order, positions, starts, lengths, queries, seen, longest, rule, scale, softcap=None, sink_logits=None
):
    """Do what the reference does, for contiguous tensors and at most 64 KV heads."""
    (_, ring, heads, dim), (rows, kv_heads), v_dim = queries.shape, starts.shape, values.shape[1]
    segments, group = rows * kv_heads, heads // kv_heads
    q, most = group * rule.window, cdiv(longest, SHORTEST)
    is_wide = dim > 128 or keys.dtype == torch.float32
    parts_of, votes_of = (WIDE_TILE, WIDE_TILE) if is_wide else (LSE_TILE, VOTES_TILE)
    blocks = cdiv(q, parts_of[0])
    splits = max(1, min(most, PROGRAMS // (segments * blocks)))
    parts, lse, votes = floats(keys, splits, segments, q), floats(keys, segments, q), floats(keys, len(keys))
    voting = queries, keys, order, starts, lengths, seen
    shape = kv_heads, dim, scale, softcap, rule.budget, group, rule.window, ring, pow2(kv_heads), padded(dim)
    _log_sum_exp[segments, blocks, splits](
        *voting, parts, splits, *shape, *parts_of[:2], num_warps=parts_of[2], num_stages=2
    )
    merge[rows * heads, cdiv(rule.window, ROWS)](parts, sink_logits, lse, heads, rule.window, splits, ROWS, num_warps=4)
    splits = max(1, min(most, PROGRAMS // segments))
    _votes[segments, splits](*voting, lse, votes, splits, *shape, *votes_of[:2], num_warps=votes_of[2], num_stages=2)
    lowest = pow2(kv_heads) if rule.sure < rule.budget else 1  # a KV head gives up so many at most
    found = torch.empty(segments, lowest + 1, dtype=torch.int64, device=keys.device)
    _lowest[segments,](
        votes, starts, lengths, found, kv_heads, *rule[:5], rule.pool, rule.pooling == "max", pow2(kv_heads), lowest,
        CHOSEN_FROM, num_warps=4,
    )  # fmt: skip
    _evict[segments,](
        keys, values, order, positions, starts, lengths, seen, found, kv_heads, dim, v_dim, pow2(kv_heads), lowest,
        pow2(dim), pow2(v_dim), MOVED, num_warps=4,
    )  # fmt: skip


@triton.jit
def _excess(lengths, kv_heads, budget, HEADS: tl.constexpr):
    """Tokens of a row beyond its budget; not more than 0 where it is not full."""
    heads = tl.arange(0, HEADS)
    return tl.sum(tl.load(lengths + heads, mask=heads < kv_heads, other=0), 0) - kv_heads * budget


@triton.jit
def _ages(order, places, valid, length):
    """0 for the newest token of a KV head, which is the last one and not in `order` yet. order: of the first token"""
    tokens = tl.load(order + places, mask=valid, other=0)
    return tl.where(places == length - 1, 0, length - 1 - tokens)


@triton.jit
def _queries(
    queries, ids, segment, seen, kv_heads, dim, GROUP: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Some of the window's queries in the heads of a group, head by head, newest first. -> [ids, DIM]"""
    row, heads = segment // kv_heads, kv_heads * GROUP
    newest = ((tl.load(seen + row) - 1) % (RING - 1)).to(tl.int32)
    slots = (newest + RING - 1 - ids % WINDOW) % (RING - 1)
    mine = queries + (row * RING * heads + segment % kv_heads * GROUP) * dim
    return load_rows(mine + (slots * heads + ids // WINDOW) * dim, ids < GROUP * WINDOW, dim, DIM)


@triton.jit
def _logits(queries, keys, scale, softcap):
    """In powers of two."""
    if softcap is not None:
        return attention_logits(queries, keys, scale, softcap) * LOG2E
    return dot(queries, keys) * (scale * LOG2E)


@kernel(do_not_specialize=["splits"])
def _log_sum_exp(
    queries, keys, order, starts, lengths, seen, parts, splits, kv_heads, dim, scale, softcap, budget,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    segment, block, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    ids = block * QUERIES + tl.arange(0, QUERIES)
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    if _excess(lengths + segment // kv_heads * kv_heads, kv_heads, budget, HEADS) > 0:
        length, base = tl.load(lengths + segment).to(tl.int32), tl.load(starts + segment)
        query = _queries(queries, ids, segment, seen, kv_heads, dim, GROUP, WINDOW, RING, DIM)
        first, last = part_of(length, split, splits, KEYS)
        for start in range(first, last, KEYS):
            places = start + tl.arange(0, KEYS)
            valid = places < last
            ages = _ages(order + base, places, valid, length)
            k = load_rows(keys + base * dim + places * dim, valid, dim, DIM)
            logits = _logits(query, tl.trans(k), scale, softcap)
            visible = valid[None, :] & (ages[None, :] >= (ids % WINDOW)[:, None])
            logits = tl.where(visible, logits, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(logits, 1))
            safe = tl.where(new_max == float("-inf"), 0.0, new_max)
            row_sum = row_sum * tl.exp2(row_max - safe) + tl.sum(tl.exp2(logits - safe[:, None]), 1)
            row_max = new_max
    result = tl.where(row_sum == 0, float("-inf"), (row_max + tl.log2(tl.where(row_sum == 0, 1.0, row_sum))) / LOG2E)
    part = (split * tl.num_programs(0) + segment) * GROUP * WINDOW
    tl.store(parts + part + ids, result, mask=ids < GROUP * WINDOW)


@kernel(do_not_specialize=["splits"])
def _votes(
    queries, keys, order, starts, lengths, seen, lse, votes, splits, kv_heads, dim, scale, softcap, budget,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """votes: in the tokens' order, not in that of their slots"""
    segment, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _excess(lengths + segment // kv_heads * kv_heads, kv_heads, budget, HEADS) > 0:
        length, base = tl.load(lengths + segment).to(tl.int32), tl.load(starts + segment)
        first, last = part_of(length, split, splits, KEYS)
        for start in range(first, last, KEYS):
            places = start + tl.arange(0, KEYS)
            valid = places < last
            ages = _ages(order + base, places, valid, length)
            k = tl.trans(load_rows(keys + base * dim + places * dim, valid, dim, DIM))
            received = tl.zeros([QUERIES, KEYS], tl.float32)  # reduced at the end: no synchronization before
            for block in range(0, tl.cdiv(GROUP * WINDOW, QUERIES)):
                ids = block * QUERIES + tl.arange(0, QUERIES)
                query = _queries(queries, ids, segment, seen, kv_heads, dim, GROUP, WINDOW, RING, DIM)
                sums = tl.load(lse + segment * GROUP * WINDOW + ids, mask=ids < GROUP * WINDOW, other=float("inf"))
                probs = tl.exp2(_logits(query, k, scale, softcap) - (sums * LOG2E)[:, None])
                received += tl.where(ages[None, :] >= (ids % WINDOW)[:, None], probs, 0.0)
            tl.store(votes + base + length - 1 - ages, tl.sum(received, 0) / GROUP, mask=valid)


@kernel()
def _lowest(
    votes, starts, lengths, found, kv_heads, budget, sure, window, sinks, recent, WIDTH: tl.constexpr,
    LARGEST: tl.constexpr, HEADS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tokens of a KV head that may be evicted, those of fewest pooled votes, and its row's excess.

    A token is its score, its index and its head backwards in one number: that is the order in which tokens leave.
    """
    segment, places = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    head = segment % kv_heads
    excess = _excess(lengths + segment - head, kv_heads, budget, HEADS)
    length, votes = tl.load(lengths + segment).to(tl.int32), votes + tl.load(starts + segment)
    end = tl.where(excess > 0, length - recent, 0)
    lowest = tl.where(places < tl.where(excess > 0, length - sure, 0), NONE, -1).to(tl.int64)
    highest = tl.max(lowest, 0)
    for start in range(sinks, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        total, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for step in range(-(WIDTH // 2), WIDTH // 2 + 1):
            near = tokens + step
            among = (near >= 0) & (near < length - window)
            value = tl.load(votes + near, mask=among, other=0.0)
            largest = tl.maximum(largest, tl.where(among, value, float("-inf")))
            total += value
            count += among.to(tl.float32)
        score = largest if LARGEST else (total / WIDTH) / tl.maximum(count / WIDTH, 1e-9)
        token = (sortable(score) << 31) | (tokens.to(tl.int64) << 8) | (255 - head)
        token = tl.where(tokens < end, token, NONE)
        least = tl.min(token, 0)
        while least < highest:
            replaced = tl.min(tl.where(lowest == highest, places, MOST), 0)
            lowest = tl.where(places == replaced, least, lowest)
            highest = tl.max(lowest, 0)
            token = tl.where(token == least, NONE, token)
            least = tl.min(token, 0)
    found += segment * (MOST + 1)
    tl.store(found + places, tl.where(lowest < 0, NONE, lowest))
    tl.store(found + MOST, excess.to(tl.int64))


@kernel()
def _evict(
    keys, values, order, positions, starts, lengths, seen, found, kv_heads, dim, v_dim, HEADS: tl.constexpr,
    MOST: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment, each = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    length, base = tl.load(lengths + segment).to(tl.int32), tl.load(starts + segment)
    row = segment // kv_heads
    if length > 0:
        newest, first = tl.load(seen + row).to(tl.int32) - 1, row * kv_heads
        others = tl.arange(0, HEADS * MOST)
        tokens = tl.load(
            found + (first + others // MOST) * (MOST + 1) + others % MOST, mask=others // MOST < kv_heads, other=NONE
        )
        threshold = tl.full([], -1, tl.int64)
        for _ in range(0, tl.load(found + segment * (MOST + 1) + MOST).to(tl.int32)):
            threshold = tl.min(tl.where(tokens > threshold, tokens, NONE), 0)
        own = tl.load(found + segment * (MOST + 1) + each)
        leaves = (own <= threshold) & (own < NONE)
        gone = tl.where(leaves, (own >> 8) & 8388607, 1073741824).to(tl.int32)
        left = length - tl.sum(leaves.to(tl.int32), 0)

        last = left + each  # those that lie behind what is left, and stay, go where evicted ones lie
        token = length - 1 - _ages(order + base, last, last < length, length)
        position = tl.where(last == length - 1, newest, tl.load(positions + base + last, mask=last < length, other=0))
        moves = (last < length) & (tl.sum((token[:, None] == gone[None, :]).to(tl.int32), 1) == 0)
        token -= tl.sum((token[:, None] > gone[None, :]).to(tl.int32), 1)
        number = tl.cumsum(moves.to(tl.int32), 0) - 1
        target, filled = tl.zeros([MOST], tl.int32), 0
        if left < length:
            for start in range(0, left, BLOCK):
                places = start + tl.arange(0, BLOCK)
                before = tl.load(order + base + places, mask=places < left, other=-1)
                is_gone = tl.sum((before[:, None] == gone[None, :]).to(tl.int32), 1)
                hole = filled + tl.cumsum(is_gone, 0) - 1
                taken = (is_gone > 0)[:, None] & moves[None, :] & (hole[:, None] == number[None, :])
                after = before - tl.sum((before[:, None] > gone[None, :]).to(tl.int32), 1)
                after = tl.where(is_gone > 0, tl.sum(tl.where(taken, token[None, :], 0), 1), after)
                tl.store(order + base + places, after, mask=places < left)
                target += tl.sum(tl.where(taken, places[:, None], 0), 0)
                filled += tl.sum(is_gone, 0)
            tl.store(positions + base + target, position, mask=moves)
            copy_rows(keys + (base + last) * dim, keys + (base + target) * dim, moves, dim, DIM)
            copy_rows(values + (base + last) * v_dim, values + (base + target) * v_dim, moves, v_dim, V_DIM)
            tl.store(lengths + segment, left.to(tl.int64))
        else:
            tl.store(order + base + length - 1, length - 1)
            tl.store(positions + base + length - 1, newest)
