"""What the oracles share: attention, grouping, pooling, the tie rule, the unit rule (METHODS.md, "Common ground").

Shapes: Q [Hq, t, d], K and V [Hk, m, d], float64. In an ordinary prefill t == m == n. In a replayed stream the
`t` queries are all queries seen so far and the `m` keys are the cached candidates; `qpos[row]` and `kpos[head][j]`
are then the true positions, and a query sees the keys whose position is not after its own.
"""

import math
from bisect import bisect_right

import numpy as np


def dots(keys, query):
    """q·k of one query with every row of `keys`; einsum without BLAS, so equal rows give bit-equal results."""
    return np.einsum("jd,d->j", np.asarray(keys, dtype=np.float64), np.asarray(query, dtype=np.float64))


def softmax(logits):
    """Softmax of a 1-D array; an empty one stays empty."""
    if len(logits) == 0:
        return np.zeros(0)
    e = np.exp(logits - np.max(logits))
    return e / math.fsum(e)


def default_scale(scale, d):
    return 1.0 / math.sqrt(d) if scale is None else scale


def positions(Q, K, qpos=None, kpos=None):
    """Fill in the plain prefill's positions 0..n-1 where none are given."""
    if qpos is None:
        assert Q.shape[1] == K.shape[1], "without positions, queries and keys must be the same tokens"
        qpos = list(range(Q.shape[1]))
    if kpos is None:
        kpos = [list(range(K.shape[1])) for _ in range(K.shape[0])]
    return list(qpos), [list(p) for p in kpos]


def attention(Q, K, scale=None, rows=None, qpos=None, kpos=None):
    """a[h, r, j]: causal attention of the last `rows` queries (default: all) over all keys, per query head.

    Row r is the query at token t-rows+r; query head h reads KV head h // g. A row that sees no key is all zero.
    """
    heads, t, d = Q.shape
    group = heads // K.shape[0]
    scale = default_scale(scale, d)
    rows = t if rows is None else min(rows, t)
    qpos, kpos = positions(Q, K, qpos, kpos)
    out = np.zeros((heads, rows, K.shape[1]))
    for h in range(heads):
        kh = h // group
        for r in range(rows):
            token = t - rows + r
            seen = bisect_right(kpos[kh], qpos[token])  # keys 0..seen-1 are not after the query
            out[h, r, :seen] = softmax(dots(K[kh, :seen], Q[h, token]) * scale)
    return out


def group_mean(per_query_head, key_heads):
    """Average the g query heads h with h // g == KV head. [Hq, n] -> [Hk, n]."""
    heads = len(per_query_head)
    group = heads // key_heads
    out = np.zeros((key_heads, per_query_head.shape[1]))
    for h in range(heads):
        out[h // group] += per_query_head[h] / group
    return out


def window_votes(Q, K, rows, scale=None, qpos=None, kpos=None):
    """Attention summed over the last `rows` queries, averaged over the group: [Hk, m]."""
    a = attention(Q, K, scale, rows, qpos, kpos)
    return group_mean(a.sum(axis=1), K.shape[0])


def pool1d(x, kernel, kind="avg"):
    """1-D pooling of one row, stride 1, "same"; the average divides by the number of real elements."""
    assert kernel % 2 == 1, "only odd kernels have a centre"
    half, n = kernel // 2, len(x)
    out = np.zeros(n)
    for j in range(n):
        under = [float(v) for v in x[max(0, j - half) : min(n, j + half + 1)]]
        out[j] = max(under) if kind == "max" else math.fsum(under) / len(under)
    return out


def top(scores, k):
    """Indices of the k best scores, ties to the LATER token, returned ascending."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], -j))
    return sorted(order[: max(0, k)])


def kept_window(window, budget, n):
    """(voting rows, forced tokens) of an observation window that is itself kept: it shrinks to B//2 (and to n)."""
    return max(1, min(window, budget // 2, n)), min(window, budget // 2, n)


def everything(K):
    """All tokens, per KV head: the answer whenever n <= B."""
    return [list(range(K.shape[1])) for _ in range(K.shape[0])]


def force(scores, tokens):
    """A copy of one row of scores with +inf on the tokens that must stay."""
    out = np.array(scores, dtype=np.float64)
    for j in tokens:
        out[j] = math.inf
    return out


def take_units(unit_of_token, unit_scores, token_scores, budget, forced=()):
    """The unit rule: forced tokens first; then whole units, best first; the first that does not fit is cut.

    `unit_of_token[j]` is the unit of token j (None: in no unit); `unit_scores[u]` ranks the units. A unit costs its
    non-forced tokens. The first unit that does not fit gives its best-scoring tokens and spends the budget exactly.
    Ties: the unit that ends later, the later token. Returns the kept tokens, ascending.
    """
    kept = set(forced)
    members = {}
    for j, u in enumerate(unit_of_token):
        if u is not None and j not in kept:
            members.setdefault(u, []).append(j)
    left = budget - len(kept)
    for u in sorted(members, key=lambda u: (-unit_scores[u], -members[u][-1])):
        if left <= 0:
            break
        if len(members[u]) <= left:
            kept.update(members[u])
            left -= len(members[u])
            continue
        best = sorted(members[u], key=lambda j: (-token_scores[j], -j))
        kept.update(best[:left])
        break
    return sorted(kept)
