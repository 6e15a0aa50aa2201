"""Eviction at every decode step by the votes of a row's newest queries, of all rows at once; the host knows no length.

One pass over the keys, for each key's votes. The log-sum-exps of the window's queries are kept: from one step to the
next they lose what evicted keys had of them. Only where none are kept yet, or a query lost much at once, another pass
computes them anew. A program of each KV head finds its tokens of fewest votes; then one of each KV head compares those
of all heads of its row, evicts its own ones that are among the lowest, and moves its last tokens to their places.
Tokens do not stay in order: `order` says which one lies where. Rows that are not full are left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvkeep.kernels.triton.common import MIN_BLOCK, cdiv, floats, kernel, padded, pow2
from kvkeep.kernels.triton.decode import part_of
from kvkeep.kernels.triton.tiles import LOG2E, attention_logits, copy_rows, dot, load_rows, sortable

PROGRAMS = 2048  # several for each multiprocessor of a large GPU: KV heads differ in length
SHORTEST = 128  # tokens of a KV head that are worth another program
LSE_TILE, VOTES_TILE = (64, 128, 4), (64, 64, 4)  # queries, keys, warps
WIDE_TILE = 64, 64, 4  # of float32, or of long vectors
CHOSEN_FROM, MOVED = 1024, 256  # tokens per iteration
LOST = tl.constexpr(0.5)  # of what a query attends to: where more is evicted, a difference would be of few digits
NONE = tl.constexpr(9223372036854775807)


def evict_voted(
    keys, values, order, positions, starts, lengths, queries, seen, lse, known, longest, rule, scale, softcap=None,
    sink_logits=None,
):  # fmt: skip
    """Do what the reference does, for contiguous tensors and at most 64 KV heads."""
    (_, ring, heads, dim), (rows, kv_heads), v_dim = queries.shape, starts.shape, values.shape[1]
    segments, group = rows * kv_heads, heads // kv_heads
    is_wide = dim > 128 or keys.dtype == torch.float32
    summed, voted = (WIDE_TILE, WIDE_TILE) if is_wide else (LSE_TILE, VOTES_TILE)
    votes, lowest = floats(keys, len(keys)), pow2(kv_heads) if rule.sure < rule.budget else 1
    found = torch.empty(segments, lowest + 1, dtype=torch.int64, device=keys.device)  # a KV head gives up no more
    held = queries, keys, order, starts, lengths, seen, lse
    shape = kv_heads, dim, scale, softcap, rule.budget, group, rule.window, ring, pow2(kv_heads), padded(dim)
    _log_sum_exp[segments, cdiv(group * rule.window, summed[0])](
        *held, known, sink_logits, *shape, *summed[:2], num_warps=summed[2], num_stages=2
    )
    splits = max(1, min(cdiv(longest, SHORTEST), PROGRAMS // segments))
    _votes[segments, splits](*held, votes, splits, *shape, *voted[:2], num_warps=voted[2], num_stages=2)
    _lowest[segments,](
        votes, starts, lengths, found, kv_heads, *rule[:5], rule.pool, rule.pooling == "max", pow2(kv_heads), lowest,
        CHOSEN_FROM, num_warps=4,
    )  # fmt: skip
    _evict[segments,](
        *held, values, positions, known, found, v_dim, *shape, pow2(v_dim), lowest, max(MIN_BLOCK, lowest), MOVED,
        summed[0], num_warps=4,
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
def _window(
    queries, lse, ids, segment, seen, kv_heads, dim, GROUP: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Some of the window's queries in a group's heads, head by head, newest first. -> they, and where their sums are"""
    row, heads = segment // kv_heads, kv_heads * GROUP
    newest = ((tl.load(seen + row) - 1) % (RING - 1)).to(tl.int32)
    slots = (newest + RING - 1 - ids % WINDOW) % (RING - 1)
    mine = queries + (row * RING * heads + segment % kv_heads * GROUP) * dim
    query = load_rows(mine + (slots * heads + ids // WINDOW) * dim, ids < GROUP * WINDOW, dim, DIM)
    return query, lse + (segment * GROUP + ids // WINDOW) * RING + slots


@triton.jit
def _logits(queries, keys, scale, softcap):
    """In powers of two."""
    if softcap is not None:
        return attention_logits(queries, keys, scale, softcap) * LOG2E
    return dot(queries, keys) * (scale * LOG2E)


@kernel()
def _log_sum_exp(
    queries, keys, order, starts, lengths, seen, lse, known, sink_logits, kv_heads, dim, scale, softcap, budget,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute those of the window's queries where they are not known; each sees the keys that are not younger."""
    segment, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    first = lengths + segment // kv_heads * kv_heads
    if (tl.load(known + segment) == 0) & (_excess(first, kv_heads, budget, HEADS) > 0):
        row_max = tl.full([QUERIES], float("-inf"), tl.float32)
        row_sum = tl.zeros([QUERIES], tl.float32)
        length, base = tl.load(lengths + segment).to(tl.int32), tl.load(starts + segment)
        query, sums = _window(queries, lse, ids, segment, seen, kv_heads, dim, GROUP, WINDOW, RING, DIM)
        for start in range(0, length, KEYS):
            places = start + tl.arange(0, KEYS)
            valid = places < length
            ages = _ages(order + base, places, valid, length)
            k = load_rows(keys + base * dim + places * dim, valid, dim, DIM)
            logits = _logits(query, tl.trans(k), scale, softcap)
            visible = valid[None, :] & (ages[None, :] >= (ids % WINDOW)[:, None])
            row_max, row_sum = _add(tl.where(visible, logits, float("-inf")), row_max, row_sum)
        inside = ids < GROUP * WINDOW
        if sink_logits is not None:
            sink = sink_logits + segment % kv_heads * GROUP + ids // WINDOW
            sink = tl.load(sink, mask=inside, other=0.0).to(tl.float32) * LOG2E
            row_max, row_sum = _add(sink[:, None], row_max, row_sum)
        tl.store(sums, (row_max + tl.log2(row_sum)) / LOG2E, mask=inside)


@triton.jit
def _add(logits, row_max, row_sum):
    """More logits of sums of exponentials, in powers of two."""
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    safe = tl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, row_sum * tl.exp2(row_max - safe) + tl.sum(tl.exp2(logits - safe[:, None]), 1)


@kernel(do_not_specialize=["splits"])
def _votes(
    queries, keys, order, starts, lengths, seen, lse, votes, splits, kv_heads, dim, scale, softcap, budget,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """votes: in the tokens' order, not in that of their slots; nobody asks for those of the window, which are wrong

    All other tokens are seen by all of the window's queries, so there is no mask.
    """
    segment, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _excess(lengths + segment // kv_heads * kv_heads, kv_heads, budget, HEADS) > 0:
        length, base = tl.load(lengths + segment).to(tl.int32), tl.load(starts + segment)
        first, last = part_of(length, split, splits, KEYS)
        for start in range(first, last, KEYS):
            places = start + tl.arange(0, KEYS)
            valid = places < last
            k = load_rows(keys + base * dim + places * dim, valid, dim, DIM)
            received = tl.zeros([KEYS, QUERIES], tl.float32)  # reduced at the end: no synchronization before
            for block in range(0, tl.cdiv(GROUP * WINDOW, QUERIES)):
                ids = block * QUERIES + tl.arange(0, QUERIES)
                query, sums = _window(queries, lse, ids, segment, seen, kv_heads, dim, GROUP, WINDOW, RING, DIM)
                known = tl.load(sums, mask=ids < GROUP * WINDOW, other=float("inf")) * LOG2E
                received += tl.exp2(_logits(k, tl.trans(query), scale, softcap) - known[None, :])
            ages = _ages(order + base, places, valid, length)
            tl.store(votes + base + length - 1 - ages, tl.sum(received, 1) / GROUP, mask=valid)


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
    queries, keys, order, starts, lengths, seen, lse, values, positions, known, found, v_dim, kv_heads, dim, scale,
    softcap, budget, GROUP: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, MOST: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
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
        excess = tl.load(found + segment * (MOST + 1) + MOST).to(tl.int32)
        for _ in range(0, excess):
            threshold = tl.min(tl.where(tokens > threshold, tokens, NONE), 0)
        own = tl.load(found + segment * (MOST + 1) + each)
        leaves = (own <= threshold) & (own < NONE)
        gone = tl.where(leaves, (own >> 8) & 8388607, 1073741824).to(tl.int32)
        left = length - tl.sum(leaves.to(tl.int32), 0)

        last = left + each  # those that lie behind what is left, and stay, go where evicted ones lie
        token = length - 1 - _ages(order + base, last, last < length, length)
        position = tl.where(last == length - 1, newest, tl.load(positions + base + last, mask=last < length, other=0))
        is_gone = (last < length)[:, None] & (token[:, None] == gone[None, :])
        moves = (last < length) & (tl.sum(is_gone.to(tl.int32), 1) == 0)
        token -= tl.sum((token[:, None] > gone[None, :]).to(tl.int32), 1)
        number = tl.cumsum(moves.to(tl.int32), 0) - 1
        target, filled = tl.zeros([MOST], tl.int32), 0
        place = tl.sum(tl.where(is_gone, last[:, None], 0), 0)  # of each evicted token
        lost = tl.full([], 0.0, tl.float32)  # what the queries attended to evicted tokens
        if left < length:
            for start in range(0, left, BLOCK):
                places = start + tl.arange(0, BLOCK)
                before = tl.load(order + base + places, mask=places < left, other=-1)
                evicted_here = before[:, None] == gone[None, :]
                holes = tl.sum(evicted_here.to(tl.int32), 1)
                hole = filled + tl.cumsum(holes, 0) - 1
                taken = (holes > 0)[:, None] & moves[None, :] & (hole[:, None] == number[None, :])
                after = before - tl.sum((before[:, None] > gone[None, :]).to(tl.int32), 1)
                after = tl.where(holes > 0, tl.sum(tl.where(taken, token[None, :], 0), 1), after)
                tl.store(order + base + places, after, mask=places < left)
                target += tl.sum(tl.where(taken, places[:, None], 0), 0)
                place += tl.sum(tl.where(evicted_here, places[:, None], 0), 0)
                filled += tl.sum(holes, 0)
            same = leaves[None, :] & (tl.arange(0, PADDED)[:, None] == each[None, :])  # the side of a matrix product
            evicted = tl.sum(same.to(tl.int32), 1) > 0
            evicted_at = tl.sum(tl.where(same, place[None, :], 0), 1)
            k = load_rows(keys + (base + evicted_at) * dim, evicted, dim, DIM)
            lost = _subtract(
                queries, lse, k, evicted, segment, seen, kv_heads, dim, scale, softcap, GROUP, WINDOW, RING, DIM,
                QUERIES,
            )  # fmt: skip
            tl.debug_barrier()  # evicted keys are read before others take their places
            tl.store(positions + base + target, position, mask=moves)
            copy_rows(keys + (base + last) * dim, keys + (base + target) * dim, moves, dim, DIM)
            copy_rows(values + (base + last) * v_dim, values + (base + target) * v_dim, moves, v_dim, V_DIM)
            tl.store(lengths + segment, left.to(tl.int64))
        else:
            tl.store(order + base + length - 1, length - 1)
            tl.store(positions + base + length - 1, newest)
        if excess > 0:
            tl.store(known + segment, (lost <= LOST).to(tl.int32))


@triton.jit
def _subtract(
    queries, lse, keys, valid, segment, seen, kv_heads, dim, scale, softcap, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    RING: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Take evicted keys, which all of the window's queries see, out of their sums. -> the most that a query loses"""
    most = tl.full([], 0.0, tl.float32)
    for block in range(0, tl.cdiv(GROUP * WINDOW, QUERIES)):
        ids = block * QUERIES + tl.arange(0, QUERIES)
        query, sums = _window(queries, lse, ids, segment, seen, kv_heads, dim, GROUP, WINDOW, RING, DIM)
        before = tl.load(sums, mask=ids < GROUP * WINDOW, other=float("inf"))
        probs = tl.exp2(_logits(query, tl.trans(keys), scale, softcap) - (before * LOG2E)[:, None])
        lost = tl.sum(tl.where(valid[None, :], probs, 0.0), 1)
        tl.store(sums, before + tl.log(1 - tl.minimum(lost, LOST)), mask=ids < GROUP * WINDOW)
        most = tl.maximum(most, tl.max(lost, 0))
    return most
