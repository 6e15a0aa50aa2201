"""IntentKV (METHODS.md, system 1)."""

import math

import numpy as np

from .common import attention, everything, force, group_mean, take_units


def kl(p, m):
    """KL(p || m), natural log, 0·log 0 = 0."""
    return math.fsum(a * math.log(a / b) for a, b in zip(p, m, strict=True) if a > 0.0)


def jsd(p, q):
    """Jensen-Shannon divergence (step 3), never below 0."""
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return max(0.0, 0.5 * kl(p, m) + 0.5 * kl(q, m))


def smooth_rows(A, smooth):
    """Step 2: each row becomes the sum of itself and its smooth-1 successors, renormalised to sum 1."""
    out = []
    for i in range(len(A)):
        row = A[i : i + smooth].sum(axis=0)
        total = math.fsum(row)
        out.append(row / total if total > 0 else row)
    return out


def whole_pools(A, smooth):
    """The second reading's step 2: only sums of exactly `smooth` rows, each brought to sum 1; none if α < smooth."""
    out = []
    for i in range(len(A) - smooth + 1):
        row = sum(A[i + k] for k in range(smooth))
        total = math.fsum(row)
        out.append(row / total if total > 0 else row)
    return out


def start_of_jumps(A, smooth):
    """Steps 2-4, "first": j_i against row 0, the row before the biggest increase of j (first of equals)."""
    rows = [row.tolist() for row in smooth_rows(A, smooth)]
    j = [math.sqrt(jsd(row, rows[0])) for row in rows]
    best, start = 0.0, 0  # no positive jump: the whole window
    for i in range(len(j) - 1):
        if j[i + 1] - j[i] > best:
            best, start = j[i + 1] - j[i], i
    return start


def start_of_steps(A, smooth):
    """Steps 2-4, "subsequent": d_i between rows i and i + 1, the row before the biggest (first of equals)."""
    rows = [row.tolist() for row in whole_pools(A, smooth)]
    d = [math.sqrt(jsd(rows[i + 1], rows[i])) for i in range(len(rows) - 1)]
    if max(d, default=0.0) <= 1e-6:  # no step, or fewer than two rows: the whole window
        return 0
    return d.index(max(d))


def intention_start(A, smooth=8, boundary="first"):
    """Steps 2-4 for one query head's window attention A [α, n]: the intention is rows start..α-1."""
    return {"first": start_of_jumps, "subsequent": start_of_steps}[boundary](A, smooth)


def forced_tokens(n, budget, sinks, recent):
    """The first `sinks`, then the last `recent`, never more than the budget."""
    sinks = min(sinks, budget)
    recent = min(recent, budget - sinks)
    return sorted(set(range(sinks)) | set(range(n - recent, n)))


def votes_intentkv(Q, K, *, scale=None, window=64, smooth=8, intention=True, boundary="first", qpos=None, kpos=None):
    """Steps 1-5: a_intent [Hk, m]."""
    A = attention(Q, K, scale, window, qpos, kpos)  # α > n: use n
    mean = np.zeros((len(A), A.shape[2]))
    for h in range(len(A)):
        start = intention_start(A[h], smooth, boundary) if intention else 0
        mean[h] = A[h, start:].sum(axis=0) / (A.shape[1] - start)
    return group_mean(mean, K.shape[0])


def scores_intentkv(Q, K, V, budget, *, block=16, recent=0, sinks=0, **votes):
    """[Hk, m]: a_intent, +inf on the tokens `sinks=` and `recent=` force to stay. `votes`: see votes_intentkv."""
    forced = forced_tokens(K.shape[1], budget, sinks, recent)
    return np.array([force(row, forced) for row in votes_intentkv(Q, K, **votes)])


def block_scores(row, block, forced=()):
    """Step 6: (block of every token, sum of each block's non-forced a_intent)."""
    n, stay = len(row), set(forced)
    unit = [j // block for j in range(n)]
    scores = []
    for start in range(0, n, block):
        scores.append(math.fsum(row[j] for j in range(start, min(start + block, n)) if j not in stay))
    return unit, scores


def oracle_intentkv(Q, K, V, budget, *, block=16, recent=0, sinks=0, **votes):
    """Step 7: the best blocks, the first that does not fit cut to its best tokens (unit rule)."""
    n = K.shape[1]
    if n <= budget:
        return everything(K)
    stay = forced_tokens(n, budget, sinks, recent)
    kept = []
    for row in votes_intentkv(Q, K, **votes):
        unit, scores = block_scores(row, block, stay)
        kept.append(take_units(unit, scores, row, budget, stay))
    return kept
