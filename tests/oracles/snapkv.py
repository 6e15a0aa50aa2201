"""SnapKV and ChunkKV (METHODS.md, the table of comparisons; "Pooling" and "Windows" of Common ground)."""

import math

import numpy as np

from .common import everything, force, kept_window, pool1d, take_units, top, window_votes


def scores_snapkv(Q, K, V, budget, *, scale=None, window=64, pool=5, kind="avg", qpos=None, kpos=None):
    """[Hk, m]: the window's votes (group averaged, then pooled) before the window, +inf on the window."""
    n = K.shape[1]
    rows, stay = kept_window(window, budget, n)
    votes = window_votes(Q, K, rows, scale, qpos, kpos)  # the group is reduced BEFORE pooling
    out = np.zeros_like(votes)
    for h in range(len(votes)):
        out[h, : n - stay] = pool1d(votes[h, : n - stay], pool, kind)  # candidates only
        out[h] = force(out[h], range(n - stay, n))
    return out


def oracle_snapkv(Q, K, V, budget, *, scale=None, window=64, pool=5, kind="avg", qpos=None, kpos=None):
    """Top B - w of the candidates, and the window."""
    if K.shape[1] <= budget:
        return everything(K)
    scores = scores_snapkv(Q, K, V, budget, scale=scale, window=window, pool=pool, kind=kind, qpos=qpos, kpos=kpos)
    return [top(row, budget) for row in scores]


def scores_chunkkv(Q, K, V, budget, *, scale=None, window=64, chunk=10, qpos=None, kpos=None):
    """[Hk, m]: un-pooled votes of the window, +inf on the window itself."""
    n = K.shape[1]
    rows, stay = kept_window(window, budget, n)
    votes = window_votes(Q, K, rows, scale, qpos, kpos)
    return np.array([force(row, range(n - stay, n)) for row in votes])


def chunk_scores(row, stay, chunk):
    """(unit of every token, summed votes of every chunk) over the candidates of one head."""
    candidates = len(row) - stay
    unit = [j // chunk if j < candidates else None for j in range(len(row))]
    scores = []
    for start in range(0, candidates, chunk):
        votes = row[start : min(start + chunk, candidates)]
        scores.append(math.fsum(votes))
    return unit, scores


def oracle_chunkkv(Q, K, V, budget, *, scale=None, window=64, chunk=10, qpos=None, kpos=None):
    """Best chunks of candidates by summed votes (unit rule), and the window."""
    n = K.shape[1]
    if n <= budget:
        return everything(K)
    _, stay = kept_window(window, budget, n)
    kept = []
    for row in scores_chunkkv(Q, K, V, budget, scale=scale, window=window, chunk=chunk, qpos=qpos, kpos=kpos):
        unit, scores = chunk_scores(row, stay, chunk)
        kept.append(take_units(unit, scores, row, budget, range(n - stay, n)))
    return kept
