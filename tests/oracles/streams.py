"""Replaying an input that arrives in chunks: after each chunk the kept tokens and the chunk compete again."""

import numpy as np


def stream(select, Q, K, V, budget, chunk, **params):
    """Kept true positions per KV head after the whole input, compressing to B after every chunk.

    `select` is an oracle that takes qpos= and kpos= (snapkv, chunkkv, tova, h2o, intentkv, streamingllm,
    lm_infinite, intelllm). It is given all queries seen so far and the cached keys in order, numbered 0..m-1; a query
    sees the cached keys that are not after it. A method's own "n" is then the number m of candidates, except for the
    window of voting queries, which are the last queries seen.
    """
    key_heads, n = K.shape[0], K.shape[1]
    kept = [[] for _ in range(key_heads)]
    for start in range(0, n, chunk):
        end = min(start + chunk, n)
        kept = [positions + list(range(start, end)) for positions in kept]
        if len(kept[0]) <= budget:
            continue
        cached_K = np.array([K[h, kept[h]] for h in range(key_heads)])
        cached_V = np.array([V[h, kept[h]] for h in range(key_heads)])
        chosen = select(Q[:, :end], cached_K, cached_V, budget, qpos=range(end), kpos=kept, **params)
        kept = [[kept[h][j] for j in chosen[h]] for h in range(key_heads)]
    return kept
