"""Some tokens decoded from what another method keeps of a text, before the rest of it is evicted: their queries.

The text's last token is fed once more, without its copy in the text: so the first token of the draft comes from the
same tokens as the others. The text itself stays as it is. Rows of all caches that are prefilled together are drafted
together, MOST_ROWS of them in one step. Where steps are captured, they read copies of the texts (draft_pool.py); where
they are not, the texts themselves (held_draft.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from kvkeep.cache import draft_pool
from kvkeep.cache.backend import CacheState
from kvkeep.cache.draft_buffers import Kept
from kvkeep.cache.draft_pool import MOST_ROWS, free_pool, pool_for
from kvkeep.cache.evictor import SelectedLayer
from kvkeep.cache.held_draft import HeldDraft
from kvkeep.cache.replay import LayerRows, RowText
from kvkeep.compress.method import Draft
from kvkeep.model.chat import eos_token_ids
from kvkeep.model.hf_cache import key_shape, query_heads

Stores = dict[int, Any]  # by cache: its layers, or what a method selected of them


@dataclass(frozen=True)
class DraftRow:
    """One row of a cache, with a text after which a draft is decoded."""

    cache: CacheState
    draft: Draft
    row: int
    text: RowText
    nbytes: int  # of the keys and values it is decoded from, and of its queries


def unlimited() -> int:
    """Nobody else counts the memory."""
    return sys.maxsize


def draft_tokens(model: Any, draft: Draft, kept: int) -> int:
    """Per KV head, of a row of which so many are kept: tokens, and as many as its queries and a free row's take."""
    return kept + draft.steps + draft.steps * -(-query_heads(model) // key_shape(model)[0])


def draft_queries(caches: Sequence[CacheState]) -> list[LayerRows]:
    """Draft for all caches. -> the queries of every layer and row that has a draft, by cache [heads, tokens, dim]"""
    found: dict[int, LayerRows] = {id(cache): {} for cache in caches}
    rows = [each for cache in caches for each in _rows(cache)]
    most = min([draft_pool.most_held(caches[0].model), *(cache.pass_end.draft_room() for cache in caches)])
    stores: Stores = {}
    for group in _groups(rows, most):
        _draft(group, stores, most, found)
        last = id(group[-1].cache)
        stores = {last: stores[last]}  # it may have more rows
    return [found[id(cache)] for cache in caches]


def _rows(cache: CacheState) -> Iterator[DraftRow]:
    """Those that are evicted from."""
    if not (draft := cache.method.draft):
        return
    token_bytes = sum(layer.token_nbytes * layer.kv_heads for layer in cache.backend.store.values())
    for row, (n, text) in enumerate(zip(cache.tracker.seen, cache.unreplayed.rows, strict=True)):
        budget = cache.backend.budget.tokens(n)
        if text.ids and (n > budget or cache.method.needed is not None):  # that may be less than the budget
            tokens = draft_tokens(cache.model, draft, draft.kept(budget, n))
            yield DraftRow(cache, draft, row, text, tokens * token_bytes)


def _groups(rows: Sequence[DraftRow], most: int) -> Iterator[list[DraftRow]]:
    """Make groups of at most MOST_ROWS rows and so many bytes; a row that takes more is drafted alone."""
    group: list[DraftRow] = []
    for each in rows:
        if len(group) == MOST_ROWS or (group and sum(one.nbytes for one in group) + each.nbytes > most):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _draft(group: list[DraftRow], stores: Stores, most: int, found: dict[int, LayerRows]) -> None:
    """All together or, where memory is short, in two halves."""
    model, steps = group[0].cache.model, max(each.draft.steps for each in group)
    try:
        texts = [_kept(list(rows), stores) for _, rows in groupby(group, lambda each: id(each.cache))]
        with pool_for(model, sum(each.nbytes for each in group)) as pool:
            stop = all(each.draft.predicting for each in group)
            eos = eos_token_ids(model, group[0].cache.tokenizer)
            drafts = HeldDraft(model) if pool is None else pool
            drafted = drafts(texts, steps, group[0].cache.pass_end.between_passes, most, eos, stop)
        for cache, text in zip({id(each.cache): each.cache for each in group}.values(), texts, strict=True):
            cache.backend.count_beside(_bytes_beside(text, steps, drafts.captures))
    except torch.OutOfMemoryError:
        if len(group) == 1:
            raise
    else:
        for number, each in enumerate(group):
            mine = _counted(each.draft, drafted.ends[number])
            found[id(each.cache)] |= {(i, each.row): rows[number, :, mine] for i, rows in drafted.queries.items()}
        return
    free_pool(model)
    for half in (group[: len(group) // 2], group[len(group) // 2 :]):
        _draft(half, stores, most, found)


def _bytes_beside(text: Kept, steps: int, copies: bool) -> int:
    """Bytes of keys and values that a draft holds beside a text: of its own tokens, and of copies of the text's.

    copies: of all layers; else of one at a time, where the text is not read as it lies
    """
    own, copied = 0, [0]
    for i, layer in text.store.items():
        lengths = text.segments(i)[1]
        own += len(lengths) * steps * layer.kind.slot_bytes
        if copies or isinstance(layer, SelectedLayer):
            copied.append(sum(lengths) * layer.kind.slot_bytes)
    return own + (sum(copied) if copies else max(copied))


def _counted(draft: Draft, end: int) -> slice:
    """The steps whose queries the scorer sees. end: steps up to the one that predicts an EOS"""
    return slice(min(end, draft.steps)) if draft.predicting else slice(1, draft.steps)


def _kept(rows: Sequence[DraftRow], stores: Stores) -> Kept:
    """What the draft's method keeps of these rows of one cache: all that is held, if no more than that is."""
    cache, draft = rows[0].cache, rows[0].draft
    if draft.hold:
        stores[id(cache)] = cache.backend.store
    elif id(cache) not in stores:
        seen = cache.tracker.seen
        stores[id(cache)] = cache.backend.select(draft.method, seen, [True] * len(seen), {}, {})
    return Kept(stores[id(cache)], {each.row: each.text for each in rows})
