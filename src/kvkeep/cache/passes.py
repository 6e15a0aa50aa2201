"""The model runs again after a prompt, before anything of it is evicted, if a method asks for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvkeep.cache.backend import CacheState
from kvkeep.cache.draft import draft_queries, unlimited
from kvkeep.cache.replay import Replays, no_call, replay_scores
from kvkeep.model.fused import fused_ops


def run_passes(caches: Sequence[CacheState], known: Replays | None = None) -> None:
    """After a pass that prefilled these caches: of those whose prompt is at its end, then evict from all their layers.

    known: scores of the text, where all of them have the same; to which those found here are added
    """
    ended = [cache for cache in caches if cache.unreplayed.due and not cache.unreplayed.layout]
    due = [cache for cache in ended if not cache.passes_later]
    if not due:
        return
    with fused_ops(due[0].model, 1):  # these passes show other tokens than the prefill around them
        for cache, queries in zip(due, draft_queries(due), strict=True):
            cache.evict_held(replay_scores(cache, [] if known is None else known), queries)


@contextmanager
def between_passes(caches: Sequence[CacheState], call: Callable[[], None], room: Callable[[], int]) -> Iterator[None]:
    """Within, it is called between these passes; room: bytes that drafts of several rows may take"""
    for cache in caches:
        cache.between_passes, cache.draft_room = call, room
    try:
        yield
    finally:
        for cache in caches:
            cache.between_passes, cache.draft_room = no_call, unlimited
