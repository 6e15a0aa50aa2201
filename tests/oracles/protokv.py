"""ProtoKV and SATKV (METHODS.md, system 5)."""

import math

import numpy as np

from .common import dots, everything, force, group_mean, kept_window, top, window_votes


def cosines(keys, vector):
    """Cosine of every row of `keys` with `vector`; 0 where either is the zero vector."""
    length = math.sqrt(float(np.einsum("d,d->", vector, vector)))
    out = dots(keys, vector)
    for j in range(len(keys)):
        norm = math.sqrt(float(np.einsum("d,d->", keys[j], keys[j])))
        out[j] = out[j] / (norm * length) if norm > 0 and length > 0 else 0.0
    return out


def neighbour_similarity(keys, kappa=5):
    """Step 1: mean cosine of K_i with K_{i-κ..i+κ}, itself included, fewer at the ends."""
    n = len(keys)
    out = np.zeros(n)
    for i in range(n):
        c = cosines(keys[max(0, i - kappa) : min(n, i + kappa + 1)], keys[i])
        out[i] = math.fsum(c) / len(c)
    return out


def outlier_degree(keys, kappa=5):
    """Step 2: (mean(S) - S) / std(S), population std; all 0 when the std is 0."""
    S = neighbour_similarity(keys, kappa)
    mean = math.fsum(S) / len(S)
    std = math.sqrt(math.fsum((s - mean) ** 2 for s in S) / len(S))
    return (mean - S) / std if std > 0 else np.zeros(len(S))


def bucket_of(key, W, b):
    """Step 4: bit j (weight 2^j) is sqrt(2/r)·cos(W_j·k + b_j) > 0; the number mod u = 2^r."""
    bits = len(W)
    number = 0
    for j in range(bits):
        phi = math.sqrt(2.0 / bits) * math.cos(float(np.einsum("d,d->", W[j], key)) + float(b[j]))
        if phi > 0:
            number += 2**j
    return number % 2**bits


def ranges_of(n, chunks):
    """Step 5: v contiguous ranges of size n//v, the last takes the remainder; n < v: one token each."""
    v = min(chunks, n)
    size = n // v
    return [range(r * size, (r + 1) * size if r < v - 1 else n) for r in range(v)]


def prototypes_of(keys, tokens_in_bucket, tokens_in_range):
    """Mean keys of the non-empty buckets (in bucket order), then of the non-empty ranges (in order)."""
    means = []
    for tokens in list(tokens_in_bucket) + list(tokens_in_range):
        if len(tokens) > 0:
            means.append(sum(keys[j] for j in tokens) / len(tokens))
    return np.array(means)


def clusters_of(keys, W, b, kappa=5, anchors=32, chunks=500, prototypes="both", lsh_join="bucket"):
    """Steps 1-6 for one key head: the cluster number of every token.

    "chunks": no anchors are taken out, ranges only. "lsh": every token is bucketed; its cluster is the bucket itself
    (the paper's "buckets and groups all tokens via LSH") or, lsh_join="cosine", the nearest bucket mean.
    """
    assert prototypes in ("both", "chunks", "lsh")
    n = len(keys)
    if prototypes == "lsh":
        anchor = list(range(n))
    elif prototypes == "chunks":
        anchor = []
    else:
        anchor = top(outlier_degree(keys, kappa), anchors)  # step 3
    bucket = {j: bucket_of(keys[j], W, b) for j in anchor}
    if prototypes == "lsh" and lsh_join == "bucket":
        return [bucket[j] for j in range(n)]
    in_bucket = [[j for j in anchor if bucket[j] == s] for s in range(2 ** len(W))] if anchor else []
    in_range = [] if prototypes == "lsh" else [[j for j in r if j not in bucket] for r in ranges_of(n, chunks)]
    means = prototypes_of(keys, in_bucket, in_range)
    lengths = np.array([math.sqrt(float(np.einsum("d,d->", c, c))) for c in means])
    joined = []
    for j in range(n):
        norm = math.sqrt(float(np.einsum("d,d->", keys[j], keys[j])))
        product, length = dots(means, keys[j]), norm * lengths
        cosine = np.divide(product, length, out=np.zeros(len(means)), where=length > 0)
        joined.append(int(np.argmax(cosine)))  # ties: the lower index
    return joined


def window_of(window, budget):
    """L_obs: 32, or 8 when B < 128, unless given."""
    if window is None:
        return 8 if budget < 128 else 32
    return window


def votes_protokv(Q, K, rows, votes="raw", scale=None, qpos=None, kpos=None):
    """Step 7, s [Hk, m]: raw logits of the last `rows` queries summed (no mask, no scale, as printed), or attention.

    With more queries than keys (a cache replayed while decoding), the last queries of all; raw votes need no position.
    """
    assert votes in ("raw", "softmax")
    if votes == "softmax":
        return window_votes(Q, K, rows, scale, qpos, kpos)
    heads, t, _ = Q.shape
    group = heads // K.shape[0]
    s = np.zeros((heads, K.shape[1]))
    for h in range(heads):
        for row in range(t - rows, t):
            s[h] += dots(K[h // group], Q[h, row])
    return group_mean(s, K.shape[0])


def cluster_means(s, cluster):
    """ŝ: mean of s over the token's cluster, all its tokens (the window's too)."""
    members = {}
    for j, c in enumerate(cluster):
        members.setdefault(c, []).append(j)
    mean = {c: math.fsum(s[j] for j in tokens) / len(tokens) for c, tokens in members.items()}
    return np.array([mean[c] for c in cluster])


def _protokv(Q, K, budget, W, b, scale, votes, kappa, anchors, chunks, window, prototypes, lsh_join, qpos, kpos):
    """(ŝ with +inf on the window, s, clusters), each per key head."""
    n = K.shape[1]
    W, b = np.asarray(W, dtype=np.float64), np.asarray(b, dtype=np.float64)
    rows, stay = kept_window(window_of(window, budget), budget, n)
    s = votes_protokv(Q, K, rows, votes, scale, qpos, kpos)
    ranks, clusters = [], []
    for h in range(K.shape[0]):
        Wh, bh = (W[h], b[h]) if W.ndim == 3 else (W, b)  # one projection for all heads, or one per key head
        cluster = clusters_of(K[h], Wh, bh, kappa, anchors, chunks, prototypes, lsh_join)
        clusters.append(cluster)
        ranks.append(force(cluster_means(s[h], cluster), range(n - stay, n)))
    return np.array(ranks), s, clusters


def scores_protokv(
    Q,
    K,
    V,
    budget,
    *,
    W,
    b,
    scale=None,
    votes="raw",
    kappa=5,
    anchors=32,
    bits=2,
    chunks=500,
    window=None,
    prototypes="both",
    lsh_join="bucket",
    qpos=None,
    kpos=None,
):
    """[Hk, n]: ŝ, +inf on the window. (Inside a cluster the tokens' own s decides: see oracle_protokv.)"""
    assert np.asarray(W).shape[-2] == bits, "W is [bits, d]"
    settings = (votes, kappa, anchors, chunks, window, prototypes, lsh_join)
    return _protokv(Q, K, budget, W, b, scale, *settings, qpos, kpos)[0]


def oracle_protokv(
    Q,
    K,
    V,
    budget,
    *,
    W,
    b,
    scale=None,
    votes="raw",
    kappa=5,
    anchors=32,
    bits=2,
    chunks=500,
    window=None,
    prototypes="both",
    lsh_join="bucket",
    qpos=None,
    kpos=None,
):
    """Step 8: top B - L_obs tokens before the window by (ŝ, s, later), and the window. W is drawn with γ already."""
    assert np.asarray(W).shape[-2] == bits, "W is [bits, d]"
    n = K.shape[1]
    if n <= budget:
        return everything(K)
    settings = (votes, kappa, anchors, chunks, window, prototypes, lsh_join)
    ranks, s, _ = _protokv(Q, K, budget, W, b, scale, *settings, qpos, kpos)
    kept = []
    for h in range(K.shape[0]):
        order = sorted(range(n), key=lambda j: (-ranks[h, j], -s[h, j], -j))
        kept.append(sorted(order[:budget]))
    return kept


def random_features(d, bits=2, gamma=None, seed=0):
    """A W [bits, d] ~ N(0, γ²), γ = 1/sqrt(d) by default, and b [bits] ~ U(0, 2π)."""
    rng = np.random.default_rng(seed)
    gamma = 1.0 / math.sqrt(d) if gamma is None else gamma
    return rng.normal(0.0, gamma, (bits, d)), rng.uniform(0.0, 2.0 * math.pi, bits)


def scores_satkv(Q, K, V, budget, *, scale=None, kappa=5, window=None, qpos=None, kpos=None):
    """[Hk, n]: the outlier degree, +inf on the window. Queries and positions are not used."""
    n = K.shape[1]
    _, stay = kept_window(window_of(window, budget), budget, n)
    return np.array([force(outlier_degree(keys, kappa), range(n - stay, n)) for keys in K])


def oracle_satkv(Q, K, V, budget, *, scale=None, kappa=5, window=None, qpos=None, kpos=None):
    """Top B - L_obs by Θ before the window, and the window."""
    if K.shape[1] <= budget:
        return everything(K)
    return [top(row, budget) for row in scores_satkv(Q, K, V, budget, kappa=kappa, window=window)]
