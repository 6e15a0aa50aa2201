"""AhaKV, the prefill (METHODS.md, system 3)."""

import math

import numpy as np

from .common import default_scale, dots, everything, force, group_mean, kept_window, pool1d, softmax, top


def gain(seen, budget, d, scale):
    """Factor of the raw q·k in a row that sees `seen` tokens: sqrt(2 ln(i/B)/d) if i > B, else the model's scale."""
    return math.sqrt(2.0 * math.log(seen / budget) / d) if seen > budget else scale


def value_prior_of(values, kernel):
    """γ̄: squared norms, average-pooled over all tokens, divided by the maximum (all-zero values: all ones)."""
    gamma = pool1d(np.array([math.fsum(x * x for x in v) for v in values]), kernel)
    return gamma / gamma.max() if gamma.max() > 0 else np.ones(len(gamma))


def scores_ahakv(Q, K, V, budget, *, scale=None, recent=32, pool=5, value_pool=5, step_gain=True, value_prior=True):
    """[Hk, n]: pooled γ̄·S, +inf on the recent tokens."""
    heads, n, d = Q.shape
    key_heads = K.shape[0]
    scale = default_scale(scale, d)
    rows, stay = kept_window(recent, budget, n)
    S = np.zeros((heads, n))
    for h in range(heads):
        for i0 in range(n - rows, n):  # recent accumulation
            factor = gain(i0 + 1, budget, d, scale) if step_gain else scale
            S[h, : i0 + 1] += softmax(dots(K[h // (heads // key_heads), : i0 + 1], Q[h, i0]) * factor)
    S = group_mean(S, key_heads)
    out = []
    for kh in range(key_heads):
        prior = value_prior_of(V[kh], value_pool) if value_prior else np.ones(n)
        out.append(force(pool1d(prior * S[kh], pool), range(n - stay, n)))  # pooled over ALL tokens, then selected
    return np.array(out)


def oracle_ahakv(Q, K, V, budget, *, scale=None, recent=32, pool=5, value_pool=5, step_gain=True, value_prior=True):
    """Top B_s of the tokens before the recent ones, and the recent."""
    if K.shape[1] <= budget:
        return everything(K)
    scores = scores_ahakv(
        Q,
        K,
        V,
        budget,
        scale=scale,
        recent=recent,
        pool=pool,
        value_pool=value_pool,
        step_gain=step_gain,
        value_prior=value_prior,
    )
    return [top(row, budget) for row in scores]
