"""Which of the tokens put away are fetched: whole units, best first, until the quota is spent."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.compress.retrieval.index import UNWANTED
from kvkeep.compress.select import best_first
from kvkeep.kernels.dispatch import Best
from kvkeep.types import Selection


def by_unit(member: Tensor) -> tuple[Tensor, Tensor]:
    """The order that puts tokens unit after unit, and how many each unit has. [heads, n], [heads, units]"""
    sizes = torch.zeros(len(member), int(member.max()) + 1, dtype=torch.long, device=member.device)
    return member.sort(dim=1, stable=True).indices, sizes.scatter_add_(1, member, torch.ones_like(member))


def _spend_even(worth: Tensor, size: int, quota: int) -> Tensor:
    """`spend` where every unit has as many tokens and is wanted, and the quota whole units. [heads, quota]"""
    best = best_first(worth)[:, : quota // size].sort(1).values
    return (best[..., None] * size + torch.arange(size, device=worth.device)).flatten(1)


spend_even = Best("spend_even", "chunks", lambda worth, *_: worth.dtype == torch.float32, _spend_even)


def spend(worth: Tensor, sizes: Tensor, quota: int, neighbours: float = 0.0) -> Selection:
    """Token numbers, counted in the order they were put away, unit after unit; the last unit is cut to fit.

    worth, sizes [heads, units]; with neighbours, that share of the quota goes to units beside the best
    """
    wanted = sizes.masked_fill(worth == UNWANTED, 0).sum(1)
    quota = min(quota, int(wanted.max()))  # every head fetches as much as the one that wants most
    order = best_first(worth)
    if neighbours:
        order = torch.stack([_with_neighbours(o, s, quota, neighbours) for o, s in zip(order, sizes, strict=True)])
    taken = sizes.gather(1, order).cumsum(1)
    slots = torch.arange(quota, device=worth.device).expand(len(worth), -1).contiguous()
    turn = torch.searchsorted(taken, slots, right=True)
    unit = order.gather(1, turn)
    starts = sizes.cumsum(1) - sizes
    before = taken.gather(1, turn) - sizes.gather(1, unit)
    index = starts.gather(1, unit) + slots - before
    return Selection(index.sort(1).values, (quota,) * len(worth))


def _with_neighbours(order: Tensor, sizes: Tensor, quota: int, share: float) -> Tensor:
    """The best units up to their share, then the units after and before each of them, then the rest."""
    best, room, counts = [], quota - int(share * quota), sizes.tolist()
    ranked = order.tolist()
    for unit in ranked:
        if room <= 0:
            break
        best.append(unit)
        room -= counts[unit]
    beside = [near for unit in best for near in (unit + 1, unit - 1) if 0 <= near < len(ranked)]
    return torch.tensor(list(dict.fromkeys([*best, *beside, *ranked])), device=order.device)


def density_share(now: float, later: list[float], left: int, unit: int) -> int:
    """ActQKV: this layer's part of what is left, by the entropy of its matches; whole units, never too much."""
    total = now + sum(later)
    part = now / total if total > 0 else 1 / (1 + len(later))
    return min(left, int(part * left / unit + 1e-9) * unit)


def density(worth: Tensor, reverse: bool = False) -> float:
    """What a layer's share goes by: the entropy of its matches; reverse: 1 / that (ActQKV, appendix D.3)."""
    entropy = match_entropy(worth)
    return 1 / max(entropy, 1e-9) if reverse else entropy


def match_entropy(worth: Tensor) -> float:
    """Of the softmax over units. worth [1, units]"""
    chances = worth[0].softmax(0)
    return float(torch.special.entr(chances).sum())
