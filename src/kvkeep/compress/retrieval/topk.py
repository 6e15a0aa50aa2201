"""Which offloaded tokens are retrieved: whole units, best first, until the quota is used up."""

from __future__ import annotations

from math import isnan

import torch
from torch import Tensor

from kvkeep.compress.retrieval.index import NEG_INF
from kvkeep.compress.select import best_first
from kvkeep.kernels.dispatch import KernelDispatch
from kvkeep.types import Selection


def by_unit(member: Tensor) -> tuple[Tensor, Tensor]:
    """The order that puts tokens unit after unit, and how many each unit has. [heads, n], [heads, units]"""
    sizes = torch.zeros(len(member), int(member.max()) + 1, dtype=torch.long, device=member.device)
    return member.sort(dim=1, stable=True).indices, sizes.scatter_add_(1, member, torch.ones_like(member))


def _select_uniform_units(scores: Tensor, size: int, quota: int) -> Tensor:
    """`select_units` where units are uniform, none scores NEG_INF and the quota is whole units. [heads, quota]"""
    best = best_first(scores)[:, : quota // size].sort(1).values
    return (best[..., None] * size + torch.arange(size, device=scores.device)).flatten(1)


select_uniform_units = KernelDispatch(
    "select_uniform_units", "unit_select", lambda scores, *_: scores.dtype == torch.float32, _select_uniform_units
)


def _select_counted(scores: Tensor, units: Tensor, counts: Tensor, selected: Tensor) -> None:
    """The `counts` best of each row's first `units` units, ascending; a row without units is left as it is.

    scores [rows, lists, most] float32, units and counts [rows] -> selected [rows, lists, room] int32, in place
    """
    for row, (n, count) in enumerate(zip(units.tolist(), counts.tolist(), strict=True)):
        if n:
            selected[row, :, :count] = best_first(scores[row, :, :n])[:, :count].sort(1).values


select_counted = KernelDispatch("select_counted", "unit_select", reference=_select_counted)


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


def density_share(now: float, later: list[float], left: int, unit: int) -> int:
    """ActQKV: this layer's part of the quota left, by the entropy of its scores; whole units, never more than left."""
    total = now + sum(later)
    part = now / total if total > 0 else 1 / (1 + len(later))
    return min(left, int(part * left / unit + 1e-9) * unit)


def _share_quota(scores: Tensor, units: Tensor, left: Tensor, densities: Tensor, layer: int, most: int) -> Tensor:
    """`density_share` in units, for all rows; their quotas left [rows] and the layer's mean density, in place.

    scores [rows, most units], units [rows]: how many count, 0 leaves a row as it is; densities [rows, layers, 2]
    float64: mean and number of steps, NaN where nothing is known; most: units a layer may get -> [rows]
    """
    shares = torch.zeros_like(left)
    for row, (n, quota, known) in enumerate(zip(units.tolist(), left.tolist(), densities.tolist(), strict=True)):
        if not n:
            continue
        now, (mean, steps) = score_entropy(scores[row : row + 1, :n]), known[layer]
        later = [now if isnan(mean) else mean for mean, _ in known[layer + 1 :]]
        shares[row] = share = min(density_share(now, later, quota, 1), most)
        left[row] = quota - share
        steps = 0 if isnan(mean) else steps
        mean = ((mean if steps else 0.0) * steps + now) / (steps + 1)
        densities[row, layer] = torch.tensor([mean, steps + 1], dtype=torch.float64)
    return shares


share_quota = KernelDispatch("share_quota", "row_queries", reference=_share_quota)


def density(scores: Tensor, reverse: bool = False) -> float:
    """What a layer's share is proportional to: the entropy of its scores; reverse: 1 / that (ActQKV, appendix D.3)."""
    entropy = score_entropy(scores)
    return 1 / max(entropy, 1e-9) if reverse else entropy


def score_entropy(scores: Tensor) -> float:
    """Of the softmax over units. scores [1, units]"""
    probs = scores[0].softmax(0)
    return float(torch.special.entr(probs).sum())
