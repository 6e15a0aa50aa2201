"""Products of keys, without those in between in memory.

`key_similarity`: a key is read once from memory, then from the cache.
`quadratic_form`, the logarithm of an expected attention weight: a program holds one query head's matrix as three of 16
bits, and takes some blocks of keys.
`assign` and `means`, rounds of clustering by cosine (ProtoKV, ClusterKV): the nearest centre of each key, and each
cluster's mean. Neither stores a matrix of tokens × clusters, and no sum depends on the order in which programs finish.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import normalize

from kvkeep.kernels.triton.common import MIN_BLOCK, cdiv, floats, kernel, padded, pow2
from kvkeep.kernels.triton.tiles import dot, load_rows

SIMILAR = 32  # tokens of a program of `key_similarity`
ASSIGNED, CENTRES = 64, 64  # tokens and centres per block; fewer centres where keys are wide
MEMBERS = 32  # of a cluster per iteration


def key_similarity(keys, token_mask, kappa):
    """Do what the reference does."""
    heads, n, dim = keys.shape
    keys, token_mask = keys.contiguous(), token_mask.contiguous()
    similarity = floats(keys, heads, n)
    _key_similarity[cdiv(n, SIMILAR), heads](
        keys, token_mask.view(torch.uint8), similarity, n, dim, kappa, SIMILAR, pow2(dim), num_warps=4
    )
    return similarity


@kernel(do_not_specialize=["n"])
def _key_similarity(keys, token_mask, similarity, n, dim, kappa, TOKENS: tl.constexpr, DIM: tl.constexpr):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    keys_here, is_token_here = _unit_keys(keys, token_mask, tokens, head, n, dim, DIM)
    total = tl.zeros([TOKENS], tl.float32)
    count = tl.zeros([TOKENS], tl.float32)
    for step in range(-kappa, kappa + 1):
        other, is_token_there = _unit_keys(keys, token_mask, tokens + step, head, n, dim, DIM)
        total += tl.sum(keys_here * other, 1)
        count += is_token_there
    mean = tl.where(is_token_here > 0, total / tl.maximum(count, 1.0), 0.0)
    tl.store(similarity + head * n + tokens, mean, mask=tokens < n)


@triton.jit
def _unit_keys(keys, token_mask, tokens, head, n, dim, DIM: tl.constexpr):
    """Keys scaled to length 1, zeros for padding; and 1 for tokens, 0 for padding."""
    within = (tokens >= 0) & (tokens < n)
    is_token = tl.load(token_mask + head * n + tokens, mask=within, other=0).to(tl.float32)
    rows = load_rows(keys + (head * n + tokens) * dim, within, dim, DIM).to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(rows * rows, 1)), 1e-12)
    return rows * (is_token / norm)[:, None], is_token


KEYS = 128  # at a time
BLOCKS = 8  # per program


def quadratic_form(keys, matrices, vectors):
    """Do what the reference does, for keys in bfloat16 with last stride 1"""
    (kv_heads, n, dim), heads = keys.shape, len(matrices)
    output = floats(keys, heads, n)
    _quadratic_form[heads * cdiv(n, KEYS * BLOCKS),](
        keys, matrices.contiguous(), vectors.contiguous(), output, *keys.stride()[:2], n, heads, heads // kv_heads, dim,
        padded(dim), KEYS, BLOCKS, num_warps=8, num_stages=2,
    )  # fmt: skip
    return output


@kernel(do_not_specialize=["n"])
def _quadratic_form(
    keys, matrices, vectors, output, key_head, key_token, n, heads, group, dim, DIM: tl.constexpr, KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    # heads of one group follow each other, and find their keys in the cache
    head, begin = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads * (KEYS * BLOCKS)
    channels = tl.arange(0, DIM)
    matrix = load_rows(matrices + head * dim * dim + channels * dim, channels < dim, dim, DIM)
    vector = tl.load(vectors + head * dim + channels, mask=channels < dim, other=0.0)
    for start in range(begin, tl.minimum(begin + KEYS * BLOCKS, n), KEYS):
        tokens = (start + tl.arange(0, KEYS)).to(tl.int64)
        k = load_rows(keys + head // group * key_head + tokens * key_token, tokens < n, dim, DIM)
        logits = tl.sum((dot(k, matrix) + vector[None, :]) * k.to(tl.float32), 1)
        tl.store(output + head * n + tokens, logits, mask=tokens < n)


def assign(keys, centres, sizes=None):
    """Do what the reference does. Products are exact to float32 for any dtype: the keys decide near ties."""
    heads, n, dim = keys.shape
    keys, centres = keys.contiguous(), normalize(centres.float(), dim=-1).contiguous()
    sizes = None if sizes is None else sizes.contiguous()
    member = torch.empty(heads, n, dtype=torch.int64, device=keys.device)
    padded_dim, is_half = padded(dim), keys.dtype != torch.float32
    _assign[cdiv(n, ASSIGNED), heads](
        keys, centres, sizes, member, n, centres.shape[1], dim, ASSIGNED,
        max(MIN_BLOCK, min(CENTRES, CENTRES * 128 // padded_dim)), padded_dim, num_warps=4 if is_half else 8,
        num_stages=2,
    )  # fmt: skip
    return member


def means(keys, member, count):
    """Do what the reference does."""
    heads, n, dim = keys.shape
    keys, (sorted_member, order) = keys.contiguous(), member.sort(dim=1, stable=True)
    numbers = torch.arange(count + 1, device=keys.device).expand(heads, -1).contiguous()
    bounds = torch.searchsorted(sorted_member, numbers.to(sorted_member.dtype))
    mean = floats(keys, heads, count, dim)
    _means[count, heads](keys, order, bounds, mean, n, count, dim, MEMBERS, pow2(dim), num_warps=4)
    return mean, bounds.diff(dim=1)


@kernel(do_not_specialize=["n", "count"])
def _assign(
    keys, centres, sizes, member, n, count, dim, TOKENS: tl.constexpr, CENTRES: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    k = load_rows(keys + (head * n + tokens) * dim, tokens < n, dim, DIM)
    best = tl.full([TOKENS], float("-inf"), tl.float32)
    best_index = tl.zeros([TOKENS], tl.int32)
    for start in range(0, count, CENTRES):
        centre_ids = start + tl.arange(0, CENTRES)
        valid = centre_ids < count
        c = load_rows(centres + (head * count + centre_ids) * dim, valid, dim, DIM)
        if sizes is not None:
            valid = valid & (tl.load(sizes + head * count + centre_ids, mask=valid, other=0) > 0)
        cosines = tl.where(valid[None, :], dot(k, tl.trans(c)), float("-inf"))
        highest = tl.max(cosines, 1)
        lowest = tl.min(tl.where(cosines == highest[:, None], centre_ids[None, :], 2147483647), 1)
        best_index = tl.where(highest > best, lowest, best_index)
        best = tl.maximum(best, highest)
    tl.store(member + head * n + tokens, best_index.to(tl.int64), mask=tokens < n)


@kernel(do_not_specialize=["n", "count"])
def _means(keys, order, bounds, mean, n, count, dim, MEMBERS: tl.constexpr, DIM: tl.constexpr):
    cluster, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    bound = bounds + head * (count + 1) + cluster
    first, end = tl.load(bound).to(tl.int32), tl.load(bound + 1).to(tl.int32)
    channels = tl.arange(0, DIM)
    total = tl.zeros([DIM], tl.float32)
    for start in range(first, end, MEMBERS):
        ranks = start + tl.arange(0, MEMBERS)
        tokens = tl.load(order + head * n + ranks, mask=ranks < end, other=0)
        k = load_rows(keys + (head * n + tokens) * dim, ranks < end, dim, DIM)
        total += tl.sum(k.to(tl.float32), 0)
    total = total / tl.maximum(end - first, 1)
    tl.store(mean + (head * count + cluster) * dim + channels, total, mask=channels < dim)
