"""KVzip (FRONTIER.md): the text is repeated, part by part; a key's score is the most attention it gets meanwhile.

Plain loops in float64. One part is the keys [start, end) of a text of n tokens; `fed` tokens follow the text.
"""

import math

import numpy as np

from .common import dots, softmax


def parts(n, chunk, words, text, lead=8, begun=0):
    """(start, end, ids that are fed) of every part. words: ids of the two instructions, and of a message's end.

    begun: tokens of the chat template before the text, which are scored with the first part and never fed.
    """
    first, later, end_of_message = words
    found = []
    for start in range(begun, n, chunk):
        end = min(n, start + chunk)
        asked = first if start == begun else later + text[max(begun, start - lead) : start]
        found.append((0 if start == begun else start, end, asked + end_of_message + text[start:end]))
    return found


def kept_logits(start, end, n, fed, sinks):
    """Of each fed token, which of the n + fed keys take part in its softmax: sinks, the part, the fed ones so far."""
    allowed = []
    for i in range(fed):
        before = [j for j in range(min(sinks, n)) if j < start]
        allowed.append(before + list(range(start, end)) + list(range(n, n + i + 1)))
    return allowed


def worth(values, wo, hidden, group):
    """f[h][i][j] = |W_O^h v_j| / |h_i|: of KVzip+. values [Hk, n, d], wo [Hq, D, d], hidden [fed, D]"""
    heads, fed, n = len(wo), len(hidden), values.shape[1]
    out = np.zeros((heads, fed, n))
    lengths = [math.sqrt(math.fsum(float(x) ** 2 for x in row)) for row in hidden]
    for h in range(heads):
        for j in range(n):
            added = math.sqrt(math.fsum(float(x) ** 2 for x in dots(wo[h], values[h // group, j])))
            for i in range(fed):
                out[h, i, j] = added / lengths[i]
    return out


def scores_from_logits(logits, start, end, n, sinks, group, weights=None, near=None, norm=0):
    """[Hk, end - start]: the maximum over fed tokens and the group, or their norm. logits [Hq, fed, n + fed], scaled

    near: a fed token counts for keys at most so far from the one it repeats; the last fed one repeats key end - 1.
    """
    heads, fed = logits.shape[:2]
    out = np.zeros((heads // group, end - start))
    for h in range(heads):
        for i, keys in enumerate(kept_logits(start, end, n, fed, sinks)):
            for j, share in zip(keys, softmax(np.array([logits[h, i, j] for j in keys])), strict=True):
                if start <= j < end and (near is None or abs(j - (end - fed + i)) <= near):
                    share = share if weights is None else share * weights[h, i, j]
                    before = out[h // group, j - start]
                    out[h // group, j - start] = before + share**norm if norm else max(before, share)
    return out ** (1 / norm) if norm else out


def logits_of(queries, keys, own, scale):
    """[Hq, fed, n + fed]: of fed tokens with the text's keys and their own."""
    heads, fed = queries.shape[:2]
    group = heads // len(keys)
    return np.array([
        [scale * dots(np.concatenate([keys[h // group], own[h // group]]), queries[h, i]) for i in range(fed)]
        for h in range(heads)
    ])  # fmt: skip
