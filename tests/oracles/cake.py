"""CAKE, arXiv 2503.12491 (METHODS.md, the table of comparisons): the eviction indicator and the layer preference."""

import math

import numpy as np

from .common import attention, everything, force, group_mean, kept_window, pool1d, top


def variance(values):
    """Sample variance, divided by one less than the count (as the official code); nought for a single value."""
    values = [float(x) for x in values]
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)


def scores_cake(Q, K, V, budget, *, scale=None, window=32, gamma=200.0, pool=5, mean_budget=None, qpos=None, kpos=None):
    """[Hk, m]: mean + gamma * variance over the voting rows per query head, group averaged, pooled over candidates.

    +inf on the window. `mean_budget` sizes the window where a layer's own budget differs from the mean over layers."""
    n = K.shape[1]
    rows, stay = kept_window(window, budget if mean_budget is None else mean_budget, n)
    a = attention(Q, K, scale, rows, qpos, kpos)
    raw = np.zeros((len(a), n))
    for h in range(len(a)):
        for j in range(n - stay):
            column = a[h, :, j]
            raw[h, j] = math.fsum(column) / len(column) + gamma * variance(column)
    raw = group_mean(raw, K.shape[0])
    out = np.zeros_like(raw)
    for h in range(len(raw)):
        out[h, : n - stay] = pool1d(raw[h, : n - stay], pool)
        out[h] = force(out[h], range(n - stay, n))
    return out


def oracle_cake(Q, K, V, budget, *, scale=None, window=32, gamma=200.0, pool=5, mean_budget=None, qpos=None, kpos=None):
    """Top B - w of the candidates, and the window."""
    if K.shape[1] <= budget:
        return everything(K)
    scores = scores_cake(
        Q,
        K,
        V,
        budget,
        scale=scale,
        window=window,
        gamma=gamma,
        pool=pool,
        mean_budget=mean_budget,
        qpos=qpos,
        kpos=kpos,
    )
    return [top(row, budget) for row in scores]


def preference_cake(Q, K, budget, *, scale=None, window=32, tau1=1.0, tau2=1.0):
    """(H, V, P) of one layer; `budget` is the mean over layers.

    H: entropy in nats of the voting rows over the candidates, summed over rows, the rows not brought back to sum 1.
    V: variance over the voting rows, summed over candidates. Both averaged over query heads.
    P = H^(1/tau1) · V^(1/tau2).
    """
    n = K.shape[1]
    rows, stay = kept_window(window, budget, n)
    a = attention(Q, K, scale, rows)[:, :, : n - stay]
    spread = [math.fsum(-p * math.log(p) for p in head.ravel().tolist() if p > 0) for head in a]
    shift = [math.fsum(variance(head[:, j]) for j in range(n - stay)) for head in a]
    H, V = math.fsum(spread) / len(a), math.fsum(shift) / len(a)
    return H, V, H ** (1.0 / tau1) * V ** (1.0 / tau2)
