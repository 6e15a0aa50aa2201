"""Remove the last tokens of a cache: a question that took part in the selection, and is asked later."""

from __future__ import annotations

from kvkeep.cache.backend import CacheState
from kvkeep.errors import CacheMisuse
from kvkeep.types import Tokens


def check_can_rewind(cache: CacheState) -> None:
    """Sliding-window and linear layers cannot return to an earlier state."""
    if cache.hf_layers:
        raise CacheMisuse(
            f"{cache.name} has layers that cannot remove a question again; use engine.generate(text, question=…)."
        )


def rewind(cache: CacheState, end: int) -> None:
    """Remove the tokens from position `end` on; what was evicted for them stays evicted."""
    check_can_rewind(cache)
    for layer in cache.backend.store.values():
        layer.fill([[_before(head, end) for head in layer.row(0)]])
    tracker = cache.tracker
    tracker.seen, tracker.prompt, tracker.padded_length = [end], [end], end
    tracker.kept = [min(tracker.kept[0], end)]
    cache.backend.query_buffer.merge_steps()
    cache.backend.query_buffer.queries.clear()


def _before(head: Tokens, end: int) -> Tokens:
    count = int((head.token_positions < end).sum())
    return head[:count]
