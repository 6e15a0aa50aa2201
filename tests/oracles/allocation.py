"""Who gets how much: PyramidKV's layer budgets and AdaKV's head quotas (METHODS.md, the table of comparisons)."""

import math
from fractions import Fraction


def pyramid(budget, layers, tokens, floor, beta=20):
    """Linearly shrinking layer budgets that sum to layers·budget exactly; `floor` tokens always stay per layer."""
    if budget >= tokens:
        return [tokens] * layers
    share = budget - floor
    low = share // beta
    high = 2 * share - low
    if high > tokens - floor:
        high = tokens - floor
        low = 2 * share - high
    out, before, cum = [], 0, Fraction(0)
    for layer in range(layers):
        cum += Fraction(share) if layers == 1 else high - Fraction((high - low) * layer, layers - 1)
        after = math.floor(cum + Fraction(1, 2))
        out.append(after - before + floor)
        before = after
    return out


def selection_order(scores, forced, units=None, worth=None):
    """A head's candidates in the order it would keep them, the forced ones left out (see common.take_units).

    Unit by unit, the most worth first, then the unit that ends later (its last candidate); inside a unit the best
    score first, then the later token. Without units every token is its own. A token of unit None is no candidate.
    """
    stay = set(forced)
    if units is None:
        units, worth = range(len(scores)), scores
    members = {}
    for j, u in enumerate(units):
        if u is not None and j not in stay:
            members.setdefault(u, []).append(j)
    order = []
    for u in sorted(members, key=lambda u: (-worth[u], -members[u][-1])):
        order += sorted(members[u], key=lambda j: (-scores[j], -j))
    return order


def adakv(scores, forced, budget, alpha=0.2, units=None, worth=None):
    """Quota of every head, its forced tokens included. `forced[h]` lists the tokens head h must keep.

    Each head is guaranteed the first floor(alpha·(B - forced)) of its own selection order; the rest of the layer's
    Hk·B goes to the best remaining candidates of all heads together. With units, units[h][j] is the unit of token j
    and worth[h][u] what the selection ranks that unit by: the pool compares worth, then the tokens' own scores, then
    takes the later token, then the lower head. Without units: scores, later token, lower head.
    """
    heads, n = len(scores), len(scores[0])
    if n <= budget:
        return [n] * heads
    quota, pooled = [], []
    for h in range(heads):
        unit = range(n) if units is None else units[h]
        value = scores[h] if units is None else worth[h]
        sure = math.floor(alpha * (budget - len(set(forced[h]))))
        quota.append(len(set(forced[h])) + sure)
        for j in selection_order(scores[h], forced[h], unit, value)[sure:]:
            pooled.append((-value[unit[j]], -scores[h][j], -j, h))
    left = heads * budget - sum(quota)
    for *_, h in sorted(pooled)[:left]:
        quota[h] += 1
    return quota


def kept_by_quota(scores, forced, quota, units=None, worth=None):
    """The tokens each head keeps under its quota: the forced ones, then a prefix of its selection order. Ascending."""
    kept = []
    for h in range(len(scores)):
        stay = set(forced[h])
        unit, value = (None, None) if units is None else (units[h], worth[h])
        order = selection_order(scores[h], stay, unit, value)
        kept.append(sorted(stay | set(order[: quota[h] - len(stay)])))
    return kept
