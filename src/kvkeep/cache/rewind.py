"""Take back the end of what a cache has read: a question that helped to choose what is kept, and is asked later."""

from __future__ import annotations

from kvkeep.cache.cache import Cache
from kvkeep.errors import CacheMisuse
from kvkeep.types import Tokens


def check_can_unread(cache: Cache) -> None:
    """Sliding-window and linear layers have forgotten what they would have to go back to."""
    if cache.stock_layers:
        raise CacheMisuse(
            f"{cache.name} has layers that cannot take back a question; use engine.generate(text, question=…)."
        )


def unread(cache: Cache, end: int) -> None:
    """Forget the tokens from position `end` on; what was dropped for them stays dropped."""
    check_can_unread(cache)
    for layer in cache.store.values():
        layer.fill([[_before(head, end) for head in layer.row(0)]])
    arrivals = cache.arrivals
    arrivals.seen, arrivals.prompt, arrivals.columns = [end], [end], end
    arrivals.held = [min(arrivals.held[0], end)]
    cache.observer.gather()
    cache.observer.voters.clear()


def _before(head: Tokens, end: int) -> Tokens:
    count = int((head.positions < end).sum())
    return head.map(lambda t: t[:count])
