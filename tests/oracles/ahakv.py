"""AhaKV, the prefill (METHODS.md, system 3)."""

import math

import numpy as np

from .common import default_scale, dots, everything, force, group_mean, kept_window, pool1d, softmax, top


def factor_of(seen, budget, d, scale, gain="replace"):
    """What a row that sees `seen` tokens multiplies the raw q·k with; λ = sqrt(2 ln(i/B)/d) where i > B.

    "replace": λ instead of the model's scale (eq. 6-12). "multiply": λ on top of it, as Algorithm 1 is printed
    (A is already divided by √d). Rows with i <= B: the model's scale.
    """
    assert gain in ("replace", "multiply")
    if seen <= budget:
        return scale
    lam = math.sqrt(2.0 * math.log(seen / budget) / d)
    return lam if gain == "replace" else lam * scale


gain = factor_of


def value_prior_of(values, kernel):
    """γ̄: squared norms, average-pooled over all tokens, divided by the maximum (all-zero values: all ones)."""
    gamma = pool1d(np.array([math.fsum(x * x for x in v) for v in values]), kernel)
    return gamma / gamma.max() if gamma.max() > 0 else np.ones(len(gamma))


def votes_ahakv(
    Q,
    K,
    V,
    budget,
    *,
    scale=None,
    recent=32,
    value_pool=5,
    step_gain=True,
    value_prior=True,
    gain="replace",
    recent_only=True,
):
    """[Hk, n]: γ̄·S, not pooled: F_0 of the generation. S sums the recent rows only, or (recent_only=False) all rows."""
    heads, n, d = Q.shape
    key_heads = K.shape[0]
    scale = default_scale(scale, d)
    rows, _ = kept_window(recent, budget, n)
    S = np.zeros((heads, n))
    for h in range(heads):
        for i0 in range(n - rows if recent_only else 0, n):
            factor = factor_of(i0 + 1, budget, d, scale, gain) if step_gain else scale
            S[h, : i0 + 1] += softmax(dots(K[h // (heads // key_heads), : i0 + 1], Q[h, i0]) * factor)
    S = group_mean(S, key_heads)
    if value_prior:
        S = np.array([value_prior_of(V[kh], value_pool) * S[kh] for kh in range(key_heads)])
    return S


def scores_ahakv(Q, K, V, budget, *, recent=32, pool=5, **votes):
    """[Hk, n]: γ̄·S pooled over ALL tokens, then +inf on the recent ones. `votes`: see votes_ahakv."""
    n = K.shape[1]
    _, stay = kept_window(recent, budget, n)
    F = votes_ahakv(Q, K, V, budget, recent=recent, **votes)
    return np.array([force(pool1d(row, pool), range(n - stay, n)) for row in F])


def oracle_ahakv(Q, K, V, budget, **options):
    """Top B_s of the tokens before the recent ones, and the recent."""
    if K.shape[1] <= budget:
        return everything(K)
    return [top(row, budget) for row in scores_ahakv(Q, K, V, budget, **options)]
