"""Budgets of layers (+cake, +entropy): weights in, whole tokens out, the total exact, a floor and a cap per layer."""

import math

from .common import attention, kept_window


def fill(weights, extra, room):
    """Share `extra` in proportion to the weights, never above `room`; what does not fit goes on to the others.

    Layers of no weight get something only when all others are full (or weightless too), and then equal parts."""
    if any(w < 0 or not math.isfinite(w) for w in weights):
        raise ValueError("weights must be finite and not negative")
    weight, given, left = [float(w) for w in weights], [0.0] * len(weights), float(extra)
    vacant = [i for i in range(len(weight)) if room[i] > 0]
    while vacant and left > 0:
        active = [i for i in vacant if weight[i] > 0]
        if not active:
            active, weight = vacant, [1.0] * len(weight)
        total = math.fsum(weight[i] for i in active)
        full = [i for i in active if left * weight[i] / total >= room[i]]
        if not full:
            for i in active:
                given[i] = left * weight[i] / total
            break
        for i in full:
            given[i] = float(room[i])
            left -= room[i]
        vacant = [i for i in vacant if i not in full]
    return given


def whole(shares):
    """Cumulative rounding, as in pyramid budgets: each share goes to one of its two neighbouring whole numbers."""
    out, before, total = [], 0, 0.0
    for share in shares:
        total += share
        after = math.floor(total + 0.5 + 1e-9)
        out.append(after - before)
        before = after
    return out


def allocate(weights, budget, n, floor=1):
    """Integer budgets of the layers: they sum to len(weights) * budget, each in floor..n; all n where n <= budget.

    budget: mean tokens per layer and KV head. floor: tokens a layer always keeps (window, sinks); at least 1."""
    layers = len(weights)
    if n <= budget:
        return [n] * layers
    floor = min(max(1, floor), budget)
    shares = fill(weights, layers * (budget - floor), [n - floor] * layers)
    return [floor + x for x in whole(shares)]


def cake_budgets(preferences, budget, n, floor):
    """From the layers' preference scores P (cake.preference_cake)."""
    return allocate(preferences, budget, n, floor)


def entropy_budgets(densities, budget, n, floor):
    """From the layers' information densities (density_entropy)."""
    return allocate(densities, budget, n, floor)


def cascade_bounds(weights, budget, n, floor=1):
    """bounds[m][i]: the most tokens layer i <= m need still hold once layer m was read. Never grow, never too small.

    One above the whole part of the real share at that stage, because the final rounding may go up."""
    layers = len(weights)
    if n <= budget:
        return [[n] * (m + 1) for m in range(layers)]
    floor = min(max(1, floor), budget)
    stages = []
    for m in range(layers):
        room = [n - floor] * (m + 1)
        shares = fill(weights[: m + 1], min(layers * budget - (m + 1) * floor, sum(room)), room)
        stages.append([min(n, floor + math.floor(share + 1e-9) + 1) for share in shares])
    return stages


def density_entropy(Q, K, budget, *, scale=None, window=32):
    """Information density of one layer in nats; `budget` is the mean over layers.

    Entropy of each voting row over the candidates, brought to sum 1, averaged over rows and query heads."""
    n = K.shape[1]
    rows, stay = kept_window(window, budget, n)
    found = []
    for head in attention(Q, K, scale, rows)[:, :, : n - stay]:
        for row in head.tolist():
            total = math.fsum(row)
            found.append(math.fsum(-p / total * math.log(p / total) for p in row if p > 0) if total > 0 else 0.0)
    return max(0.0, math.fsum(found) / len(found))


def in_turn(densities, total):
    """ActQKV's recursion with every density known: real shares of `total`, equal to sharing in proportion."""
    left, out = float(total), []
    for i in range(len(densities)):
        ahead = math.fsum(densities[i:])
        out.append(left * densities[i] / ahead if ahead > 0 else left / (len(densities) - i))
        left -= out[-1]
    return out
