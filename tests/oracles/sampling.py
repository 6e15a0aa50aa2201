"""Probabilities a next token is drawn with: temperature, then top-k, then top-p, in that order, as transformers does.

One row of logits, float64. Ties: all tokens that equal the k-th largest logit stay (so top_k may keep more than k);
where top-p must part equals, the higher token number stays, which is what a stable ascending sort leaves (transformers
sorts without asking for stability, so which of the equals stay is not said there; how many is the same).
"""

import math

import numpy as np


def greedy(logits):
    """Temperature 0: everything on the largest logit, the lowest number of equals."""
    best = max(logits)
    return [1.0 if i == list(logits).index(best) else 0.0 for i in range(len(logits))]


def probabilities(logits, allowed):
    """Softmax over the allowed tokens, exactly 0 for the others."""
    best = max(logits[i] for i in allowed)
    weights = {i: math.exp(logits[i] - best) for i in allowed}
    total = math.fsum(weights.values())
    return [weights[i] / total if i in allowed else 0.0 for i in range(len(logits))]


def allowed_by_k(logits, top_k):
    """The tokens not below the k-th largest logit; all where top_k is None, 0 or more than there are."""
    everyone = set(range(len(logits)))
    if not top_k or top_k >= len(logits):
        return everyone
    border = sorted(logits, reverse=True)[top_k - 1]
    return {i for i in everyone if logits[i] >= border}


def allowed_by_p(p, allowed, top_p):
    """From the least likely on, tokens go as long as what has gone sums to 1 - top_p at most; the likeliest stays."""
    if top_p is None or top_p >= 1.0:
        return allowed
    gone = []
    for i in sorted(allowed, key=lambda i: (p[i], i))[:-1]:
        if math.fsum(p[j] for j in [*gone, i]) > 1.0 - top_p:
            break
        gone.append(i)
    return allowed - set(gone)


def sampling_probabilities(logits, temperature=1.0, top_k=None, top_p=None):
    """[vocab], sums to 1. top_p looks at the probabilities that temperature and top_k have left."""
    logits = [float(x) for x in logits]
    if temperature == 0:
        return np.array(greedy(logits))
    logits = [x / temperature for x in logits]
    allowed = allowed_by_k(logits, top_k)
    allowed = allowed_by_p(probabilities(logits, allowed), allowed, top_p)
    return np.array(probabilities(logits, allowed))
