"""IntelLLM (METHODS.md, system 2): centre of gravity eviction, and the placement of the far past at a gap."""

from bisect import bisect_right

import numpy as np

from .common import default_scale, dots, everything, force, group_mean, positions, softmax, top


def near_of(budget, near):
    """l_tail: B//2 unless given, never above B."""
    return budget // 2 if near is None else min(near, budget)


def votes_intelllm(Q, K, near, *, scale=None, head_gravity=6, mode="global", window=64, qpos=None, kpos=None):
    """CGE, [Hk, m]: one gravity centre is masked before the softmax, the other zeroed after it; sum over queries."""
    assert mode in ("global", "local")
    heads, t, d = Q.shape
    key_heads, m = K.shape[0], K.shape[1]
    scale = default_scale(scale, d)
    qpos, kpos = positions(Q, K, qpos, kpos)
    votes = np.zeros((heads, m))
    for h in range(heads):
        kh = h // (heads // key_heads)
        for row in range(max(0, t - window), t):
            seen = bisect_right(kpos[kh], qpos[row])  # causal
            if mode == "global":
                first, last = 0, min(seen, m - near)  # tail columns are -inf before the softmax
            else:
                first, last = min(head_gravity, seen), seen  # head columns are -inf before the softmax
            if last > first:
                votes[h, first:last] += softmax(dots(K[kh, first:last], Q[h, row]) * scale)
        votes[h, :head_gravity] = 0.0  # already 0 in local mode
        votes[h, m - near :] = 0.0  # already 0 in global mode
    return group_mean(votes, key_heads)


def scores_intelllm(
    Q,
    K,
    V,
    budget,
    *,
    scale=None,
    head_gravity=6,
    near=None,
    mode="global",
    keep_head=True,
    window=64,
    qpos=None,
    kpos=None,
):
    """[Hk, m]: CGE scores, +inf on the near window and (keep_head) on the first l_head tokens, at most L_comp."""
    n = K.shape[1]
    near = min(near_of(budget, near), n)
    votes = votes_intelllm(
        Q, K, near, scale=scale, head_gravity=head_gravity, mode=mode, window=window, qpos=qpos, kpos=kpos
    )
    heads = min(head_gravity, budget - near, n) if keep_head else 0
    stay = list(range(heads)) + list(range(n - near, n))
    return np.array([force(row, stay) for row in votes])


def oracle_intelllm(
    Q,
    K,
    V,
    budget,
    *,
    scale=None,
    head_gravity=6,
    near=None,
    mode="global",
    keep_head=True,
    window=64,
    qpos=None,
    kpos=None,
):
    """Top L_comp of the far past, and the near window."""
    if K.shape[1] <= budget:
        return everything(K)
    scores = scores_intelllm(
        Q,
        K,
        V,
        budget,
        scale=scale,
        head_gravity=head_gravity,
        near=near,
        mode=mode,
        keep_head=keep_head,
        window=window,
        qpos=qpos,
        kpos=kpos,
    )
    return [top(row, budget) for row in scores]


def default_gap(far, near, trained, n):
    """max(near, min(W - far, 3·near, n - far)): no key farther than any of this text's has been, nor inside the near
    window. `far` and `near` are how many are kept, n the tokens seen so far."""
    return max(near, min(trained - far, 3 * near, n - far))


def placement_intelllm(kept, n, near, trained, gap=None):
    """RGL: the new position of every kept token of one head.

    `kept` are true positions, ascending, the last `near` of them the near window; `n` is the sequence length so far,
    so the current token is n-1; `trained` is W. The near window ends at the current token. The newest compressed key
    is `gap` behind the current token, the others consecutive before it (positions below 0 are possible: only
    distances matter to a rotation). gap == near means "no gap".
    """
    kept = list(kept)
    if len(kept) == n:  # nothing was dropped
        return kept
    compressed = len(kept) - near
    if gap is None:
        gap = default_gap(compressed, near, trained, n)
    if gap + compressed > trained:
        raise ValueError("gap + L_comp must not exceed the trained window")
    current = n - 1
    out = []
    for index in range(compressed):
        out.append(current - gap - (compressed - 1 - index))
    for index in range(near):
        out.append(current - (near - 1 - index))
    return out
