"""Eviction while decoding, replayed token by token (METHODS.md: system 3's "Generation", system 5's "Dynamic decoding",
the table of comparisons).

Q [Hq, T, d], K and V [Hk, T, d] of all T tokens; the first n are the prompt, read at once, the others come one at a
time. Every replay_* returns T - n + 1 entries: what is kept after the prompt, then after each decode step, per KV head
an ascending list of true positions. Every trace_* yields (kept, ranked): ranked[head] is {position: value} over the
tokens that were cached when the choice was made (the newest included, before any drop), so that near ties can be seen.
The state is a dictionary per KV head from true position to what that token carries.
"""

import math

import numpy as np

from .ahakv import factor_of, votes_ahakv
from .common import attention, default_scale, dots, pool1d, softmax, window_votes


def recent_and_best(ranked, budget, recent):
    """The `recent` last positions and the best B - recent of the earlier ones, ties to the later; all when they fit."""
    cached = sorted(ranked)
    if len(cached) <= budget:
        return cached
    others = cached[: len(cached) - recent]
    best = sorted(others, key=lambda j: (-ranked[j], -j))[: budget - recent]
    return sorted(best + cached[len(cached) - recent :])


def rows_now(Q, K, t, cached, factor):
    """Per query head, the attention {position: weight} of query t over the cached keys; factor multiplies raw q·k."""
    heads = Q.shape[0]
    group = heads // K.shape[0]
    rows = []
    for h in range(heads):
        tokens = sorted(cached[h // group])
        weights = softmax(dots(K[h // group, tokens], Q[h, t]) * factor)
        rows.append({j: float(w) for j, w in zip(tokens, weights, strict=True)})
    return rows


def mean_of(rows):
    """Average of several rows over the same positions."""
    return {j: math.fsum(row[j] for row in rows) / len(rows) for j in rows[0]}


def group_rows(rows, key_heads):
    """Rows of the query heads -> per KV head the mean of its group."""
    group = len(rows) // key_heads
    return [mean_of(rows[kh * group : (kh + 1) * group]) for kh in range(key_heads)]


# ---------------------------------------------------------------- H2O


def trace_h2o(Q, K, V, n, budget, scale=None):
    key_heads, T = K.shape[0], K.shape[1]
    scale = default_scale(scale, Q.shape[2])
    votes = window_votes(Q[:, :n], K[:, :n], n, scale)  # causal attention of all n queries
    mass = [{j: float(votes[h, j]) for j in range(n)} for h in range(key_heads)]
    for t in range(n - 1, T):
        if t >= n:
            for h in range(key_heads):
                mass[h][t] = 0.0
            for h, row in enumerate(group_rows(rows_now(Q, K, t, mass, scale), key_heads)):
                for j in row:
                    mass[h][j] += row[j]
        kept = [recent_and_best(mass[h], budget, budget // 2) for h in range(key_heads)]
        ranked = mass
        mass = [{j: mass[h][j] for j in kept[h]} for h in range(key_heads)]  # an evicted token takes its mass along
        yield kept, ranked


def replay_h2o(Q, K, V, n, budget, scale=None):
    """B//2 most recent and the best of the others by attention mass, which grows by one row every step."""
    return [kept for kept, _ in trace_h2o(Q, K, V, n, budget, scale)]


# ---------------------------------------------------------------- TOVA


def trace_tova(Q, K, V, n, budget, scale=None):
    key_heads, T = K.shape[0], K.shape[1]
    scale = default_scale(scale, Q.shape[2])
    last = attention(Q[:, :n], K[:, :n], scale, 1)[:, 0]
    row = mean_of([{j: float(a[j]) for j in range(n)} for a in last])  # over ALL query heads
    kept = recent_and_best(row, budget, 0)  # keeping the best, ties to the later = dropping the worst, the earlier
    yield [list(kept) for _ in range(key_heads)], [row] * key_heads
    for t in range(n, T):
        cached = kept + [t]
        row = mean_of(rows_now(Q, K, t, [cached] * key_heads, scale))
        kept = cached
        if len(cached) > budget:
            worst = min(cached, key=lambda j: (row[j], j))
            kept = [j for j in cached if j != worst]
        yield [list(kept) for _ in range(key_heads)], [row] * key_heads


def replay_tova(Q, K, V, n, budget, scale=None):
    """One choice for the layer: each step drops what the current query looks at least, itself not excepted."""
    return [kept for kept, _ in trace_tova(Q, K, V, n, budget, scale)]


# ---------------------------------------------------------------- AhaKV


def squared_norm(vector):
    return math.fsum(float(x) ** 2 for x in vector)


def prompt_ahakv(Q, K, V, n, budget, pool, value_pool, value_prior, decode_prior, **votes):
    """After the prompt, per KV head {position: value}: (ranked, F, prior).

    F is what decoding adds rows to: γ̄·S, un-pooled (Algorithm 1, line 19). With decode_prior: S itself, and `prior` is
    carried beside it, γ as it is, not divided by the maximum; else prior is 1 for all.
    """
    Q, K, V = Q[:, :n], K[:, :n], V[:, :n]
    F = votes_ahakv(Q, K, V, budget, value_pool=value_pool, value_prior=value_prior, **votes)
    ranked = [pool1d(row, pool) for row in F]
    prior = np.ones((len(K), n))
    if decode_prior and value_prior:
        F = votes_ahakv(Q, K, V, budget, value_prior=False, **votes)
        prior = [pool1d([squared_norm(v) for v in values], value_pool) for values in V]
    return [[{j: float(row[j]) for j in range(n)} for row in rows] for rows in (ranked, F, prior)]


def trace_ahakv(
    Q,
    K,
    V,
    n,
    budget,
    scale=None,
    recent=32,
    pool=5,
    value_pool=5,
    step_gain=True,
    value_prior=True,
    decode_prior=False,
    gain="replace",
    recent_only=True,
):
    T, d = Q.shape[1:]
    key_heads = K.shape[0]
    scale = default_scale(scale, d)
    stay = min(recent, budget // 2)
    votes = dict(scale=scale, recent=recent, step_gain=step_gain, gain=gain, recent_only=recent_only)
    ranked, F, prior = prompt_ahakv(Q, K, V, n, budget, pool, value_pool, value_prior, decode_prior, **votes)
    for t in range(n - 1, T):
        if t >= n:
            for kh in range(key_heads):
                F[kh][t] = 0.0
                prior[kh][t] = squared_norm(V[kh, t]) if decode_prior and value_prior else 1.0
            factor = factor_of(t + 1, budget, d, scale, gain) if step_gain else scale
            for kh, row in enumerate(group_rows(rows_now(Q, K, t, F, factor), key_heads)):
                for j in row:
                    F[kh][j] += row[j]
            ranked = [{j: F[kh][j] * prior[kh][j] for j in F[kh]} for kh in range(key_heads)]
        kept = [recent_and_best(ranked[kh], budget, stay) for kh in range(key_heads)]
        F = [{j: F[kh][j] for j in kept[kh]} for kh in range(key_heads)]
        prior = [{j: prior[kh][j] for j in kept[kh]} for kh in range(key_heads)]
        yield kept, ranked


def replay_ahakv(Q, K, V, n, budget, scale=None, recent=32, **options):
    """The recent and the best of the others: pooled γ̄·S after the prompt; afterwards F, which is γ̄·S and a row more
    every step, the row unweighted. decode_prior=True: every row, the prompt's too, is weighed with γ. See trace_ahakv.
    """
    return [kept for kept, _ in trace_ahakv(Q, K, V, n, budget, scale, recent, **options)]


# ---------------------------------------------------------------- StreamingLLM, LM-Infinite


def replay_streaming(n, T, budget, sinks, key_heads=1):
    """First min(sinks, B) tokens and the most recent, every step."""
    out = []
    cached = list(range(n))
    for t in range(n - 1, T):
        if t >= n:
            cached = cached + [t]
        while len(cached) > budget:
            cached.pop(min(sinks, budget))  # the oldest that is not a sink
        out.append([list(cached) for _ in range(key_heads)])
    return out


# ---------------------------------------------------------------- any prefill method, with a buffer


def replay_buffered(select, Q, K, V, n, budget, buffer, **params):
    """The cache grows to B + buffer, then `select` (an oracle with qpos= and kpos=) brings it back to B.

    `select` sees all queries so far and the cached keys in order, numbered 0..m-1, as in streams.stream.
    """
    key_heads, T = K.shape[0], K.shape[1]
    kept = [list(range(n)) for _ in range(key_heads)]
    if n > budget:
        kept = select(Q[:, :n], K[:, :n], V[:, :n], budget, **params)
    out = [[list(tokens) for tokens in kept]]
    for t in range(n, T):
        kept = [tokens + [t] for tokens in kept]
        if len(kept[0]) > budget and len(kept[0]) >= budget + buffer:
            cached_K = np.array([K[h, kept[h]] for h in range(key_heads)])
            cached_V = np.array([V[h, kept[h]] for h in range(key_heads)])
            seen = t + 1
            chosen = select(Q[:, :seen], cached_K, cached_V, budget, qpos=range(seen), kpos=kept, **params)
            kept = [[kept[h][j] for j in chosen[h]] for h in range(key_heads)]
        out.append([list(tokens) for tokens in kept])
    return out
