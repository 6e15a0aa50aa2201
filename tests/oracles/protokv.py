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


def bucket_count(bits=2, buckets=None):
    """u: 2^r unless given."""
    return 2**bits if buckets is None else buckets


def chunk_count(n, chunks=None):
    """v: min(500, max(1, n//16)) for the n tokens a head holds, or the number given, never above n."""
    return min(500, max(1, n // 16)) if chunks is None else min(chunks, n)


def lsh_size(n, bits=2, buckets=None, chunks=None):
    """(clusters, bits) of the "lsh" ablation: as many clusters as the original has, u + v, and ceil(log2(u + v)) bits.

    W has that many rows then. The exponent is found by doubling, so no logarithm is rounded.
    """
    clusters = bucket_count(bits, buckets) + chunk_count(n, chunks)
    needed = 0
    while 2**needed < clusters:
        needed += 1
    return clusters, needed


def bucket_of(key, W, b, buckets=None):
    """Step 4: bit j (weight 2^j) is sqrt(2/r)·cos(W_j·k + b_j) > 0; the number mod u, u = 2^r unless given."""
    bits = len(W)
    number = 0
    for j in range(bits):
        phi = math.sqrt(2.0 / bits) * math.cos(float(np.einsum("d,d->", W[j], key)) + float(b[j]))
        if phi > 0:
            number += 2**j
    return number % bucket_count(bits, buckets)


def ranges_of(n, chunks=None):
    """Step 5: the tokens of each of the v ranges, token i in range i·v//n (sizes differ by one at most)."""
    v = chunk_count(n, chunks)
    ranges = [[] for _ in range(v)]
    for i in range(n):
        ranges[i * v // n].append(i)
    return ranges


def prototypes_of(keys, members):
    """(numbers, mean keys) of the clusters that have members; the empty ones vanish, the others keep their number."""
    numbers = [c for c, tokens in enumerate(members) if len(tokens) > 0]
    return numbers, np.array([sum(keys[j] for j in members[c]) / len(members[c]) for c in numbers])


def joined(keys, members):
    """Step 6: the number of the prototype of highest cosine with each key, ties to the lower; null vectors have 0."""
    numbers, means = prototypes_of(keys, members)
    lengths = np.array([math.sqrt(float(np.einsum("d,d->", c, c))) for c in means])
    out = []
    for key in keys:
        length = math.sqrt(float(np.einsum("d,d->", key, key))) * lengths
        cosine = np.divide(dots(means, key), length, out=np.zeros(len(means)), where=length > 0)
        out.append(numbers[int(np.argmax(cosine))])
    return out


def lsh_clusters(keys, W, b, bits, buckets, chunks, lsh_join):
    """The "lsh" ablation: every token is hashed into one of u + v buckets; its cluster is the bucket itself
    (the paper's "buckets and groups all tokens via LSH") or, lsh_join="cosine", the nearest bucket mean."""
    clusters, needed = lsh_size(len(keys), bits, buckets, chunks)
    assert len(W) == needed, f"W of the lsh ablation is [{needed}, d]"
    bucket = [bucket_of(key, W, b, clusters) for key in keys]
    if lsh_join == "bucket":
        return bucket
    return joined(keys, [[j for j in range(len(keys)) if bucket[j] == c] for c in range(clusters)])


def clusters_of(
    keys, W, b, kappa=5, anchors=32, chunks=None, prototypes="both", lsh_join="bucket", bits=2, buckets=None
):
    """Steps 1-6 for one KV head: the cluster number of every token, buckets 0..u-1, then ranges u..u+v-1.

    "chunks": no anchors are taken out, ranges only (u = 0). "lsh": see lsh_clusters.
    """
    assert prototypes in ("both", "chunks", "lsh")
    n = len(keys)
    if prototypes == "lsh":
        return lsh_clusters(keys, W, b, bits, buckets, chunks, lsh_join)
    if prototypes == "chunks":
        members = ranges_of(n, chunks)
    else:
        assert len(W) == bits, "W is [bits, d]"
        u = bucket_count(bits, buckets)
        bucket = {j: bucket_of(keys[j], W, b, u) for j in top(outlier_degree(keys, kappa), anchors)}  # step 3
        members = [[j for j in range(n) if bucket.get(j) == c] for c in range(u)]
        members += [[j for j in r if j not in bucket] for r in ranges_of(n, chunks)]
    return joined(keys, members)


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


def cluster_worth(s, cluster, worth="mean"):
    """ŝ of every token: mean (or, eq. 11, sum) of s over its cluster, all its tokens (the window's too)."""
    assert worth in ("mean", "sum")
    members = {}
    for j, c in enumerate(cluster):
        members.setdefault(c, []).append(j)
    psi = {c: math.fsum(s[j] for j in tokens) for c, tokens in members.items()}
    if worth == "mean":
        psi = {c: psi[c] / len(tokens) for c, tokens in members.items()}
    return np.array([psi[c] for c in cluster])


def parts_protokv(
    Q,
    K,
    budget,
    W,
    b,
    *,
    scale=None,
    votes="raw",
    worth="mean",
    kappa=5,
    anchors=32,
    bits=2,
    buckets=None,
    chunks=None,
    window=None,
    prototypes="both",
    lsh_join="bucket",
    qpos=None,
    kpos=None,
):
    """(ŝ with +inf on the window, s, clusters), each per KV head. All settings and their defaults stand here."""
    n = K.shape[1]
    W, b = np.asarray(W, dtype=np.float64), np.asarray(b, dtype=np.float64)
    rows, stay = kept_window(window_of(window, budget), budget, n)
    s = votes_protokv(Q, K, rows, votes, scale, qpos, kpos)
    ranks, clusters = [], []
    for h in range(K.shape[0]):
        Wh, bh = (W[h], b[h]) if W.ndim == 3 else (W, b)  # one projection for all heads, or one per KV head
        cluster = clusters_of(K[h], Wh, bh, kappa, anchors, chunks, prototypes, lsh_join, bits, buckets)
        clusters.append(cluster)
        ranks.append(force(cluster_worth(s[h], cluster, worth), range(n - stay, n)))
    return np.array(ranks), s, clusters


def scores_protokv(Q, K, V, budget, *, W, b, **settings):
    """[Hk, n]: ŝ, +inf on the window. (Inside a cluster the tokens' own s decides: see oracle_protokv.)"""
    return parts_protokv(Q, K, budget, W, b, **settings)[0]


def oracle_protokv(Q, K, V, budget, *, W, b, **settings):
    """Step 8: top B - L_obs tokens before the window by (ŝ, s, later), and the window. W is drawn with γ already."""
    n = K.shape[1]
    if n <= budget:
        return everything(K)
    ranks, s, _ = parts_protokv(Q, K, budget, W, b, **settings)
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
