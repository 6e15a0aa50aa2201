"""Rounds of clustering by cosine: who is nearest to whom, and where the middle of each cluster is (ProtoKV, ClusterKV).

Neither holds a matrix of tokens × clusters, and no sum depends on the order in which programs finish.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.kernels.triton.common import AT_LEAST, INTERPRETED, cdiv, power, product

TOKENS, CENTRES = 64, 64  # at a time; fewer centres where keys are wide
MEMBERS = 32  # of a cluster at a time


def assign(keys: Tensor, centres: Tensor, sizes: Tensor | None = None) -> Tensor:
    """The centre of highest cosine, ties to the lower number; a centre of size 0 is out of reach.

    Products are exact to float32, whatever the type of the keys: a near tie should be decided by the keys.
    keys [kv_heads, n, dim], centres [kv_heads, c, dim], sizes [kv_heads, c] -> [kv_heads, n] int64
    """
    heads, n, dim = keys.shape
    keys, centres = keys.contiguous(), normalize(centres.float(), dim=-1).contiguous()
    member = torch.empty(heads, n, dtype=torch.int64, device=keys.device)
    wide, halves = max(AT_LEAST, power(dim)), keys.dtype != torch.float32
    _assign[cdiv(n, TOKENS), heads](
        keys, centres, member if sizes is None else sizes.contiguous(), member, n, centres.shape[1], dim,
        sizes is not None, INTERPRETED, TOKENS, max(AT_LEAST, min(CENTRES, CENTRES * 128 // wide)), wide,
        num_warps=4 if halves else 8, num_stages=2,
    )  # fmt: skip
    return member


def means(keys: Tensor, member: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean key of each cluster, zeros where there is none, and how many it has.

    Whose member is `count` or more belongs to nobody.
    keys [kv_heads, n, dim], member [kv_heads, n] -> [kv_heads, count, dim] float32, [kv_heads, count] int64
    """
    heads, n, dim = keys.shape
    keys, (ranked, order) = keys.contiguous(), member.sort(dim=1, stable=True)
    numbers = torch.arange(count + 1, device=keys.device).expand(heads, -1).contiguous()
    bounds = torch.searchsorted(ranked, numbers.to(ranked.dtype))
    mean = torch.empty(heads, count, dim, dtype=torch.float32, device=keys.device)
    _means[count, heads](keys, order, bounds, mean, n, count, dim, MEMBERS, power(dim), num_warps=4)
    return mean, bounds.diff(dim=1)


@triton.jit
def _assign(
    keys, centres, sizes, member, n, count, dim, SIZED: tl.constexpr, WIDEN: tl.constexpr,
    TOKENS: tl.constexpr, CENTRES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens, channels = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DIM)
    known = (tokens < n)[:, None] & (channels < dim)[None, :]
    k = tl.load(keys + (head * n + tokens)[:, None] * dim + channels[None, :], mask=known, other=0.0)
    best = tl.full([TOKENS], float("-inf"), tl.float32)
    chosen = tl.zeros([TOKENS], tl.int32)
    for start in range(0, count, CENTRES):
        numbers = start + tl.arange(0, CENTRES)
        real = numbers < count
        inside = real[:, None] & (channels < dim)[None, :]
        c = tl.load(centres + (head * count + numbers)[:, None] * dim + channels[None, :], mask=inside, other=0.0)
        if SIZED:
            real = real & (tl.load(sizes + head * count + numbers, mask=real, other=0) > 0)
        cosine = product(k, tl.trans(c), WIDEN)
        cosine = tl.where(real[None, :], cosine, float("-inf"))
        highest = tl.max(cosine, 1)
        lowest = tl.min(tl.where(cosine == highest[:, None], numbers[None, :], 2147483647), 1)
        chosen = tl.where(highest > best, lowest, chosen)
        best = tl.maximum(best, highest)
    tl.store(member + head * n + tokens, chosen.to(tl.int64), mask=tokens < n)


@triton.jit
def _means(keys, order, bounds, mean, n, count, dim, MEMBERS: tl.constexpr, DIM: tl.constexpr):
    cluster, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = bounds + head * (count + 1) + cluster
    first, end = tl.load(place).to(tl.int32), tl.load(place + 1).to(tl.int32)
    channels = tl.arange(0, DIM)
    total = tl.zeros([DIM], tl.float32)
    for start in range(first, end, MEMBERS):
        ranks = start + tl.arange(0, MEMBERS)
        tokens = tl.load(order + head * n + ranks, mask=ranks < end, other=0)
        inside = (ranks < end)[:, None] & (channels < dim)[None, :]
        k = tl.load(keys + (head * n + tokens)[:, None] * dim + channels[None, :], mask=inside, other=0.0)
        total += tl.sum(k.to(tl.float32), 0)
    total = total / tl.maximum(end - first, 1)
    tl.store(mean + (head * count + cluster) * dim + channels, total, mask=channels < dim)
