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


def adakv(scores, forced, budget, alpha=0.2):
    """Quota of every head, its forced tokens included. `forced[h]` lists the tokens head h must keep.

    Each head is guaranteed its best floor(alpha·(B - forced)) candidates; the rest of the layer's Hk·B goes to the
    best remaining candidates of all heads together (ties: later token, then lower head).
    """
    heads, n = len(scores), len(scores[0])
    if n <= budget:
        return [n] * heads
    quota, pooled = [], []
    for h in range(heads):
        stay = set(forced[h])
        candidates = sorted((j for j in range(n) if j not in stay), key=lambda j: (-scores[h][j], -j))
        sure = math.floor(alpha * (budget - len(stay)))
        quota.append(len(stay) + sure)
        pooled += [(-scores[h][j], -j, h) for j in candidates[sure:]]
    left = heads * budget - sum(quota)
    for _, _, h in sorted(pooled)[:left]:
        quota[h] += 1
    return quota


def kept_by_quota(scores, forced, quota):
    """The tokens each head keeps under its quota: the forced ones, then its best candidates. Ascending."""
    kept = []
    for h in range(len(scores)):
        stay = set(forced[h])
        order = sorted((j for j in range(len(scores[h])) if j not in stay), key=lambda j: (-scores[h][j], -j))
        kept.append(sorted(stay | set(order[: quota[h] - len(stay)])))
    return kept
