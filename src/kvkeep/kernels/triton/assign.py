"""Rounds of clustering by cosine: the nearest centre of each key, and the mean of each cluster (ProtoKV, ClusterKV).

Neither stores a matrix of tokens × clusters, and no sum depends on the order in which programs finish.
"""

import torch
import triton.language as tl
from torch.nn.functional import normalize

from kvkeep.kernels.triton.common import MIN_BLOCK, cdiv, floats, kernel, padded, pow2
from kvkeep.kernels.triton.tiles import dot, load_rows

TOKENS, CENTRES = 64, 64  # per block; fewer centres where keys are wide
MEMBERS = 32  # of a cluster per iteration


def assign(keys, centres, sizes=None):
    """Do what the reference does. Products are exact to float32 for any dtype: the keys decide near ties."""
    heads, n, dim = keys.shape
    keys, centres = keys.contiguous(), normalize(centres.float(), dim=-1).contiguous()
    sizes = None if sizes is None else sizes.contiguous()
    member = torch.empty(heads, n, dtype=torch.int64, device=keys.device)
    padded_dim, is_half = padded(dim), keys.dtype != torch.float32
    _assign[cdiv(n, TOKENS), heads](
        keys, centres, sizes, member, n, centres.shape[1], dim, TOKENS,
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
