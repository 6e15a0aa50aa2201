"""NACL, arXiv 2408.03675 (METHODS.md, the table of comparisons): proxies vote, part by rank, part by sampling."""

import math

import numpy as np

from .common import everything, kept_window, window_votes


def gumbel(uniform):
    """Uniform numbers in [0, 1) -> standard Gumbel noise, both ends clamped so that the result is finite."""
    u = np.clip(np.asarray(uniform, dtype=np.float64), 2.0**-53, 1.0 - 2.0**-53)
    return -np.log(-np.log(u))


def proxies(window, budget, n, protect=None):
    """(voting rows, forced tokens). `protect=None`: the proxies themselves stay, as in the paper's equation.

    A number: only the last `protect` tokens stay and all `window` rows vote, as in the paper's table 4."""
    if protect is None:
        return kept_window(window, budget, n)
    return max(1, min(window, n)), min(protect, budget // 2, n)


def split_nacl(budget, stay, sinks=0, random=0.7):
    """(sinks, tokens by score, tokens by sampling); with the `stay` forced ones they are exactly the budget."""
    sinks = min(sinks, budget - stay)
    rest = budget - stay - sinks
    drawn = math.floor(random * rest + 1e-9)
    return sinks, rest - drawn, drawn


def scores_nacl(Q, K, V, budget, *, scale=None, window=32, protect=None, qpos=None, kpos=None, **_):
    """[Hk, m]: attention summed over the voting rows, averaged over the group; no pooling, nothing forced."""
    rows, _stay = proxies(window, budget, K.shape[1], protect)
    return window_votes(Q, K, rows, scale, qpos, kpos)


def log_weight(score, sampling):
    """Log-probability of drawing a token, up to a constant of the head."""
    if sampling == "softmax":  # paper and official code: softmax of the summed scores
        return float(score)
    if sampling == "score":  # in proportion to the score itself
        return math.log(score) if score > 0 else -math.inf
    if sampling == "uniform":  # the paper's ablation
        return 0.0
    raise ValueError(f"unknown sampling {sampling!r}")


def best(tokens, value, count):
    """The `count` tokens of highest value, ties to the later one."""
    return sorted(tokens, key=lambda j: (-value[j], -j))[:count]


def oracle_nacl(
    Q,
    K,
    V,
    budget,
    *,
    scale=None,
    window=32,
    protect=None,
    sinks=0,
    random=0.7,
    sampling="softmax",
    noise=None,
    qpos=None,
    kpos=None,
):
    """Per KV head: sinks, best scores, a Gumbel top-k sample of the other candidates, the forced last tokens.

    noise [Hk, m]: standard Gumbel noise, one number for each KV head and token."""
    heads, n = K.shape[:2]
    if n <= budget:
        return everything(K)
    _rows, stay = proxies(window, budget, n, protect)
    first, ranked, drawn = split_nacl(budget, stay, sinks, random)
    if drawn and noise is None:
        raise ValueError("sampling needs noise")
    scores = scores_nacl(Q, K, V, budget, scale=scale, window=window, protect=protect, qpos=qpos, kpos=kpos)
    kept = []
    for h in range(heads):
        candidates = range(first, n - stay)
        chosen = set(best(candidates, scores[h], ranked))
        if drawn:
            left = [j for j in candidates if j not in chosen]
            keys = {j: log_weight(scores[h, j], sampling) + float(noise[h][j]) for j in left}
            chosen |= set(best(left, keys, drawn))
        kept.append(sorted(chosen | set(range(first)) | set(range(n - stay, n))))
    return kept
