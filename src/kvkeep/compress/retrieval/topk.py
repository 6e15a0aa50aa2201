"""Which offloaded tokens are retrieved: whole units, best first, until the quota is used up."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.compress.retrieval.index import NEG_INF
from kvkeep.kernels.torch.ranking import best_first
from kvkeep.kernels.torch.retrieval_units import score_entropy
from kvkeep.types import Selection


def by_unit(member: Tensor) -> tuple[Tensor, Tensor]:
    """The order that puts tokens unit after unit, and how many each unit has. [heads, n], [heads, units]"""
    sizes = torch.zeros(len(member), int(member.max()) + 1, dtype=torch.long, device=member.device)
    return member.sort(dim=1, stable=True).indices, sizes.scatter_add_(1, member, torch.ones_like(member))


def select_units(scores: Tensor, sizes: Tensor, quota: int, neighbours: float = 0.0) -> Selection:
    """Token numbers, counted in the order they were offloaded, unit after unit; the last unit is truncated to fit.

    scores, sizes [heads, units]; with neighbours, that share of the quota goes to units beside the best
    """
    eligible = sizes.masked_fill(scores == NEG_INF, 0).sum(1)
    quota = min(quota, int(eligible.max()))  # every head retrieves as much as the one with most
    order = best_first(scores)
    if neighbours:
        order = torch.stack([_with_neighbours(o, s, quota, neighbours) for o, s in zip(order, sizes, strict=True)])
    taken = sizes.gather(1, order).cumsum(1)
    slots = torch.arange(quota, device=scores.device).expand(len(scores), -1).contiguous()
    rank = torch.searchsorted(taken, slots, right=True)
    unit = order.gather(1, rank)
    starts = sizes.cumsum(1) - sizes
    before = taken.gather(1, rank) - sizes.gather(1, unit)
    index = starts.gather(1, unit) + slots - before
    return Selection(index.sort(1).values, (quota,) * len(scores))


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


def density(scores: Tensor, reverse: bool = False) -> float:
    """What a layer's share is proportional to: the entropy of its scores; reverse: 1 / that (ActQKV, appendix D.3)."""
    entropy = score_entropy(scores)
    return 1 / max(entropy, 1e-9) if reverse else entropy
