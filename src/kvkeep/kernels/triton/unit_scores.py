"""Representatives of offloaded units, and the units' scores for a query.

Each unit's description is read once. How many units there are may be known to the device alone (`units`, for each row
of a pool): blocks beyond are not read, and their scores not written.

`unit_representatives`, the mean key of a unit's representative tokens: one program per unit.
"""

import triton.language as tl

from kvkeep.kernels.triton.common import cdiv, floats, kernel, padded, pow2
from kvkeep.kernels.triton.tiles import dot, load_rows, store_rows

UNITS, CHANNELS = 16, 128  # per block
VOTED = 128  # tokens per block of the votes


def score_representatives(vector, unit_index, cosine, units=None):
    """Do what the reference does."""
    rows, most, dim = unit_index.shape
    vector, unit_index = vector.contiguous(), unit_index.contiguous()
    scores = floats(vector, rows, most)
    _products[cdiv(most, UNITS), rows](
        vector, unit_index, scores, units, most, dim, cosine, UNITS, CHANNELS, num_warps=4
    )
    return scores


def score_page_bounds(query, bounds, units=None):
    """Do what the reference does. query [heads, dim], bounds [kv_heads, units, 2, dim]"""
    kv_heads, most, _, dim = bounds.shape
    query, bounds = query.contiguous(), bounds.contiguous()
    scores = floats(query, kv_heads, most)
    _score_page_bounds[cdiv(most, UNITS), kv_heads](
        query, bounds, scores, units, most, dim, len(query) // kv_heads,
        1 if units is None else kv_heads // len(units), UNITS, CHANNELS, num_warps=4,
    )  # fmt: skip
    return scores


def score_tokens(queries, keys, scale, units):
    """Do what the reference does. queries [rows, heads, dim], keys [rows, kv_heads, most, dim], contiguous"""
    rows, kv_heads, most, dim = keys.shape
    heads, blocks = queries.shape[1], cdiv(most, VOTED)
    logits = floats(keys, rows, heads, most)
    parts = floats(keys, rows, heads, blocks, 2)
    scores = floats(keys, rows, most)
    _token_logits[blocks, rows * kv_heads](
        queries.float().contiguous(), keys, logits, parts, units, most, kv_heads, heads // kv_heads, dim, scale,
        padded(heads // kv_heads), padded(dim), VOTED, num_warps=4,
    )  # fmt: skip
    _log_sums[rows * heads,](parts, units, heads, blocks, VOTED, pow2(blocks), num_warps=1)
    _votes[blocks, rows](logits, parts, scores, units, most, heads, blocks, VOTED, num_warps=4)
    return scores


@kernel(do_not_specialize=["most"])
def _products(
    query, vectors, scores, units, most, dim, COSINE: tl.constexpr, UNITS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """COSINE: with a query of length 1"""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    unit_ids = block * UNITS + tl.arange(0, UNITS)
    end = most
    if units is not None:
        end = tl.load(units + row).to(tl.int32)
    if block * UNITS < end:
        entries = vectors + (row * most + unit_ids) * dim
        total, squares = tl.zeros([UNITS, CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
        for start in range(0, dim, CHANNELS):
            channels = start + tl.arange(0, CHANNELS)
            q = tl.load(query + row * dim + channels, mask=channels < dim, other=0.0).to(tl.float32)
            entry = load_rows(entries + start, unit_ids < end, dim - start, CHANNELS)
            total += entry.to(tl.float32) * q[None, :]
            squares += q * q
        result = tl.sum(total, 1)
        if COSINE:
            result = result / tl.maximum(tl.sqrt(tl.sum(squares, 0)), 1e-12)
        tl.store(scores + row * most + unit_ids, result, mask=unit_ids < end)


@kernel(do_not_specialize=["most"])
def _token_logits(
    queries, keys, logits, parts, units, most, kv_heads, group, dim, scale, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one KV head's tokens: logits of its group, and their largest and sum of exponentials."""
    block, segment = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end = tl.load(units + segment // kv_heads).to(tl.int32)
    if block * BLOCK < end:
        tokens, members = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, GROUP)
        heads, in_group = segment * group + members, members < group
        q = load_rows(queries + heads * dim, in_group, dim, DIM) * scale
        k = load_rows(keys + (segment * most + tokens) * dim, tokens < end, dim, DIM)
        product = dot(q, tl.trans(k))
        inside = in_group[:, None] & (tokens < end)[None, :]
        tl.store(logits + heads[:, None] * most + tokens[None, :], product, mask=inside)
        product = tl.where((tokens < end)[None, :], product, float("-inf"))
        largest = tl.max(product, 1)
        part = parts + (heads * tl.num_programs(0) + block) * 2
        tl.store(part, largest, mask=in_group)
        tl.store(part + 1, tl.sum(tl.exp(product - largest[:, None]), 1), mask=in_group)


@kernel(do_not_specialize=["blocks"])
def _log_sums(parts, units, heads, blocks, TOKENS: tl.constexpr, BLOCKS: tl.constexpr):
    """Log-sum-exp of one query head, into the first of its parts."""
    head, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    valid = block * TOKENS < tl.load(units + head // heads).to(tl.int32)
    part = parts + (head * blocks + block) * 2
    largest = tl.load(part, mask=valid, other=float("-inf"))
    total = tl.load(part + 1, mask=valid, other=0.0)
    top = tl.max(largest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    tl.debug_barrier()  # all are read before the first is written
    tl.store(parts + head * blocks * 2, top + tl.log(tl.maximum(tl.sum(total * tl.exp(largest - top), 0), 1e-38)))


@kernel(do_not_specialize=["most", "blocks"])
def _votes(logits, parts, scores, units, most, heads, blocks, TOKENS: tl.constexpr):
    row, tokens = tl.program_id(1).to(tl.int64), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    end = tl.load(units + row).to(tl.int32)
    if tl.program_id(0) * TOKENS < end:
        total = tl.zeros([TOKENS], tl.float32)
        for head in range(0, heads):
            log_sum = tl.load(parts + (row * heads + head) * blocks * 2)
            logit = tl.load(logits + (row * heads + head) * most + tokens, mask=tokens < end, other=0.0)
            total += tl.exp(logit - log_sum)
        tl.store(scores + row * most + tokens, total, mask=tokens < end)


@kernel(do_not_specialize=["most"])
def _score_page_bounds(
    query, bounds, scores, units, most, dim, group, kv_heads, UNITS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    unit_ids = block * UNITS + tl.arange(0, UNITS)
    end = most
    if units is not None:
        end = tl.load(units + head // kv_heads).to(tl.int32)
    if block * UNITS < end:
        rows = bounds + (head * most + unit_ids) * 2 * dim
        total = tl.zeros([UNITS, CHANNELS], tl.float32)
        for start in range(0, dim, CHANNELS):
            channels = start + tl.arange(0, CHANNELS)
            positive, negative = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
            for member in range(0, group):
                pointer = query + (head * group + member) * dim + channels
                q = tl.load(pointer, mask=channels < dim, other=0.0).to(tl.float32)
                positive, negative = positive + tl.maximum(q, 0.0), negative + tl.minimum(q, 0.0)
            low = load_rows(rows + start, unit_ids < end, dim - start, CHANNELS).to(tl.float32)
            high = load_rows(rows + dim + start, unit_ids < end, dim - start, CHANNELS).to(tl.float32)
            total += high * positive[None, :] + low * negative[None, :]
        tl.store(scores + head * most + unit_ids, tl.sum(total, 1) / group, mask=unit_ids < end)


def unit_representatives(keys, mass, units, count, cosine, out=None):
    """Do what the reference does; out: buffer for the result."""
    kv_heads, n, dim = keys.shape
    keys = keys if keys.stride(1) == dim and keys.stride(2) == 1 else keys.contiguous()
    size = n // units
    if out is None:
        out = floats(keys, 1, units, kv_heads * dim)
    if count >= size:  # all tokens are chosen
        mass = mass[:1].expand(kv_heads, -1)
    group = len(mass) // kv_heads
    width = pow2(kv_heads) * pow2(group)
    _unit_representatives[units,](
        keys, mass, out, keys.stride(0), mass.stride(0), size, min(count, size), kv_heads, group, dim, cosine,
        pow2(size), pow2(kv_heads), pow2(group), pow2(dim),
        num_warps=8 if width * max(pow2(size), pow2(dim)) > 4096 else 4,
    )  # fmt: skip
    return out


@kernel(do_not_specialize=["m_stride"])
def _unit_representatives(
    keys, mass, out, k_stride, m_stride, size, count, kv_heads, group, dim, COSINE: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of the vector of all query heads' tokens of that rank."""
    unit = tl.program_id(0).to(tl.int64)
    tokens, row = tl.arange(0, SIZE), tl.arange(0, HEADS * GROUP)
    head, member = row // GROUP, row % GROUP
    valid = (head < kv_heads) & (member < group)
    pointer = mass + (head * group + member)[:, None].to(tl.int64) * m_stride + unit * size + tokens[None, :]
    remaining = tl.load(pointer, mask=valid[:, None] & (tokens < size)[None, :], other=float("-inf"))
    total = tl.zeros([HEADS * GROUP, DIM], tl.float32)
    for _ in range(0, count):
        best = tl.max(remaining, 1)
        token = tl.max(tl.where(remaining == best[:, None], tokens[None, :], -1), 1)  # of equals, the later one
        remaining = tl.where(tokens[None, :] == token[:, None], float("-inf"), remaining)
        vectors = keys + (head.to(tl.int64) * k_stride + (unit * size + token) * dim)
        key = load_rows(vectors, valid, dim, DIM).to(tl.float32)
        if COSINE:
            key = key / tl.maximum(tl.sqrt(tl.sum(tl.sum(key * key, 1), 0) / group), 1e-12)
        total += key
    mean = tl.sum(tl.reshape(total, [HEADS, GROUP, DIM]), 1) / (count * group)
    heads = tl.arange(0, HEADS)
    store_rows(out + (unit * kv_heads + heads) * dim, mean, heads < kv_heads, dim, DIM)
