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
from torch import Tensor

from kvkeep.cache.cache_state import CacheState
from kvkeep.cache.decode import draft_pool
from kvkeep.cache.decode.draft_pool import (
    MOST_ROWS,
    DraftPool,
    Drafts,
    DraftSize,
    DraftText,
    draft_tokens,
    drafts_of,
    free_pool,
)
from kvkeep.cache.decode.held_draft import HeldDraft
from kvkeep.cache.decode.runner import Runner
from kvkeep.cache.evictor import SelectedLayer
from kvkeep.cache.replay import LayerRows, RowText
from kvkeep.compress.method import Draft
from kvkeep.model.chat import eos_token_ids
from kvkeep.storage.upload import upload

CHECKED = 8  # steps: after so many, whether all rows have ended
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
    for row, (n, text) in enumerate(zip(cache.tracker.seen, cache.unreplayed.rows, strict=True)):
        budget = cache.backend.budget.tokens(n)
        if text.ids and (n > budget or cache.method.needed is not None):  # that may be less than the budget
            tokens = draft_tokens(cache.model, draft.steps, draft.kept(budget, n))
            yield DraftRow(cache, draft, row, text, tokens * cache.backend.token_nbytes)


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
    model = group[0].cache.model
    try:
        texts = []
        for _, rows in groupby(group, lambda each: id(each.cache)):
            texts.append(_kept(list(rows), stores))
            group[0].cache.pass_end.between_passes()
        with drafts_of(model, sum(each.nbytes for each in group)) as drafts, torch.inference_mode():
            queries = _decode(group, texts, most, drafts)  # only in this mode may the pool's tensors be changed
        for cache, text in zip({id(each.cache): each.cache for each in group}.values(), texts, strict=True):
            cache.backend.count_beside(_bytes_beside(text, _steps(group), drafts is not None))
    except torch.OutOfMemoryError:
        if len(group) == 1:
            raise
    else:
        for each, mine in zip(group, queries, strict=True):
            found[id(each.cache)] |= {(i, each.row): heads for i, heads in mine.items()}
        return
    free_pool(model)
    for half in (group[: len(group) // 2], group[len(group) // 2 :]):
        _draft(half, stores, most, found)


def _steps(group: Sequence[DraftRow]) -> int:
    return max(each.draft.steps for each in group)


def _decode(
    group: Sequence[DraftRow], texts: Sequence[DraftText], most: int, drafts: Drafts | None
) -> list[dict[int, Tensor]]:
    """Decode a draft of every row. -> of each row the queries that its method scores with, by layer [heads, q, dim]

    The first step is of each text's last token. Where every draft ends at an EOS, no step follows the last of them.
    """
    first, steps, size = group[0].cache, _steps(group), DraftSize.of(texts, _steps(group))
    if drafts is None:
        pool: DraftPool | HeldDraft = HeldDraft(first.model)
        runner, rows = Runner(pool, len(group), captures=False), len(group)
    else:
        runner, rows = drafts.reserve(size, most), size.rows
        pool = runner.pool
        drafts.prepare(rows)
    pool.load(texts, steps)
    runner.tokens.zero_()
    runner.positions.zero_()
    device = runner.tokens.device
    runner.tokens[: len(group)] = upload([each.text.ids[-1:] for each in group], device)
    runner.positions[: len(group)] = upload([[each.text.position - 1] for each in group], device)
    eos = upload(torch.tensor(sorted(eos_token_ids(first.model, first.tokenizer)), dtype=torch.int64), device)
    stops, drafted = all(each.draft.predicting for each in group), list[Tensor]()
    for done in range(1, steps + 1):
        runner(rows)
        drafted.append(runner.tokens[: len(group)].clone())
        first.pass_end.between_passes()
        if stops and done % CHECKED == 0 and max(_ends(drafted, eos)) <= done:
            break
    ends = _ends(drafted, eos)
    return [
        {i: queries[:, _counted(each.draft, ends[row])] for i, queries in pool.queries(row, done).items()}
        for row, each in enumerate(group)
    ]


def _ends(drafted: Sequence[Tensor], eos: Tensor) -> list[int]:
    """Count each row's steps up to that which predicts an EOS; a row without one has more than there are steps."""
    ended = torch.isin(torch.cat(list(drafted), 1), eos).cumsum(1) > 0
    return (1 + (~ended).sum(1)).tolist()


def _bytes_beside(text: DraftText, steps: int, copies: bool) -> int:
    """Bytes of keys and values that a draft holds beside a text: of its own tokens, and of copies of the text's.

    copies: of all layers; else of one at a time, where the text is not read as it lies
    """
    own, copied = 0, [0]
    for i, layer in text.store.items():
        lengths = [n for _, n in text.segments(i)]
        own += len(lengths) * steps * layer.kind.slot_bytes
        if copies or isinstance(layer, SelectedLayer):
            copied.append(sum(lengths) * layer.kind.slot_bytes)
    return own + (sum(copied) if copies else max(copied))


def _counted(draft: Draft, end: int) -> slice:
    """The steps whose queries the scorer sees. end: steps up to the one that predicts an EOS"""
    return slice(min(end, draft.steps)) if draft.predicting else slice(1, draft.steps)


def _kept(rows: Sequence[DraftRow], stores: Stores) -> DraftText:
    """What the draft's method keeps of these rows of one cache: all that is held, if no more than that is."""
    cache, draft = rows[0].cache, rows[0].draft
    if draft.hold:
        stores[id(cache)] = cache.backend.store
    elif id(cache) not in stores:
        seen = cache.tracker.seen
        selected = cache.backend.select(draft.method, seen, [True] * len(seen), {}, {})
        if cache.backend.is_on_host:  # every step reads all layers
            selected = {i: layer.copy() for i, layer in selected.items()}
            cache.backend.count_beside(sum(layer.nbytes for layer in selected.values()))
        stores[id(cache)] = selected
    return DraftText(stores[id(cache)], {each.row: each.text for each in rows})
