"""TOVA at prefill (METHODS.md, the table of comparisons)."""

import numpy as np

from .common import attention, everything, group_mean, top


def scores_tova(Q, K, V, budget=None, *, scale=None, qpos=None, kpos=None):
    """[Hk, m]: the last query's attention averaged over ALL query heads; the same row for every KV head."""
    last = attention(Q, K, scale, 1, qpos, kpos)[:, 0, :]
    row = group_mean(last, 1)[0]
    return np.array([row for _ in range(K.shape[0])])


def oracle_tova(Q, K, V, budget, *, scale=None, qpos=None, kpos=None):
    """Top B by the last query's attention, one choice for the layer; nothing is forced to stay."""
    if K.shape[1] <= budget:
        return everything(K)
    return [top(row, budget) for row in scores_tova(Q, K, V, budget, scale=scale, qpos=qpos, kpos=kpos)]
