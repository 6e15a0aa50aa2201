"""The model runs again after a prompt, before anything of it is evicted, if a method asks for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvkeep.cache.cache_state import CacheState
from kvkeep.cache.draft import draft_queries, unlimited
from kvkeep.cache.replay import Replays, no_call, replay_scores
from kvkeep.model.fused import fused_ops


@dataclass(frozen=True)
class PassEnd:
    """What happens at the end of a forward pass, unless whoever makes it asks for something else."""

    settles_later: bool = False  # the pass does not wait for the device: `Cache.settle` does
    passes_later: bool = False  # after a prompt the model does not run again at once: whoever asked for it has it run
    verifies: bool = False  # the pass is of guesses alone, which attend to the whole history: `Cache.accept` ends it
    selects: bool = False  # it replaces what is kept by what these guesses attend to
    between_passes: Callable[[], object] = no_call  # for others who use the model meanwhile
    draft_room: Callable[[], int] = unlimited  # bytes for drafts of several caches


def run_passes(caches: Sequence[CacheState], known: Replays | None = None) -> None:
    """After a pass that prefilled these caches: of those whose prompt is at its end, then evict from all their layers.

    known: scores of the text, where all of them have the same; to which those found here are added
    """
    ended = [cache for cache in caches if cache.unreplayed.due and not cache.unreplayed.layout]
    due = [cache for cache in ended if not cache.pass_end.passes_later]
    if not due:
        return
    with fused_ops(due[0].model, 1):  # these passes show other tokens than the prefill around them
        for cache, queries in zip(due, draft_queries(due), strict=True):
            cache.evict_held(replay_scores(cache, [] if known is None else known), queries)
            cache.pass_end.between_passes()


@contextmanager
def ending(caches: Sequence[CacheState], ends: Sequence[PassEnd]) -> Iterator[None]:
    """Have forward passes of these caches, and the passes after them, end in these ways."""
    for cache, end in zip(caches, ends, strict=True):
        cache.pass_end = end
    try:
        yield
    finally:
        for cache in caches:
            cache.pass_end = PassEnd()
