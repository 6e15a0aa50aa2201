"""Methods that need no scores: full, StreamingLLM, LM-Infinite (METHODS.md, the table of comparisons)."""

from .common import everything


def oracle_full(Q, K, V, budget=None, *, scale=None):
    """Everything."""
    return everything(K)


def sinks_and_recent(n, budget, sinks):
    """First min(sinks, B) tokens and the most recent B - sinks."""
    if n <= budget:
        return list(range(n))
    first = min(sinks, budget)
    return list(range(first)) + list(range(n - (budget - first), n))


def oracle_streamingllm(Q, K, V, budget, *, scale=None, sinks=4, qpos=None, kpos=None):
    """First `sinks` and the most recent."""
    return [sinks_and_recent(K.shape[1], budget, sinks) for _ in range(K.shape[0])]


def oracle_lm_infinite(Q, K, V, budget, *, scale=None, sinks=10, qpos=None, kpos=None):
    """First `sinks` (10) and the local window."""
    return [sinks_and_recent(K.shape[1], budget, sinks) for _ in range(K.shape[0])]
