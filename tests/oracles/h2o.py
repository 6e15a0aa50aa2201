"""H2O at prefill (METHODS.md, the table of comparisons)."""

import numpy as np

from .common import everything, force, top, window_votes


def scores_h2o(Q, K, V, budget, *, scale=None, qpos=None, kpos=None):
    """[Hk, m]: attention accumulated over ALL queries, group averaged; +inf on the B//2 most recent."""
    n = K.shape[1]
    recent = min(budget // 2, n)
    votes = window_votes(Q, K, Q.shape[1], scale, qpos, kpos)
    return np.array([force(row, range(n - recent, n)) for row in votes])


def oracle_h2o(Q, K, V, budget, *, scale=None, qpos=None, kpos=None):
    """B//2 recent and B - B//2 heavy hitters among the rest."""
    if K.shape[1] <= budget:
        return everything(K)
    return [top(row, budget) for row in scores_h2o(Q, K, V, budget, scale=scale, qpos=qpos, kpos=kpos)]
