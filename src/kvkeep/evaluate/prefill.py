"""A text read with many methods and budgets, ready to be asked: what each kept, and rows that answer together.

Methods that read a text as the model alone would share one forward pass over it. Those that drop tokens answer in one
batch; nothing of a question or an answer is dropped or counted, whatever the method. Those that fetch, and long answers
that have to stay within the budget, are written by an engine each, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.cache.report import Report
from kvkeep.compress.parse import parse
from kvkeep.engine.engine import Engine
from kvkeep.engine.independent_batch import Abreast
from kvkeep.engine.pooled_batch import Together, is_ragged, packs
from kvkeep.engine.progress import now
from kvkeep.engine.shared_prefill import read
from kvkeep.model.hf_cache import runs_on, trained_window

AT_ONCE = {"cpu": 2**31, "cuda": 2**32}  # bytes of keys and values answered from together

Cell = tuple[str, int | float | None]  # a method and its budget; what keeps everything has none


class Row(Protocol):
    """Where questions are asked: one forward pass for one or more cells."""

    def feed(self, ids: Tensor, keep: int = 1) -> Tensor:
        """ids [rows, q] -> logits of the last `keep` tokens, 0: of all [rows, keep, vocabulary]"""

    def take(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""


@dataclass(frozen=True)
class Held:
    """What one cell kept of a text."""

    cell: Cell
    cache: Cache
    report: Report
    logits: Tensor  # after the text's last token [vocabulary]
    seconds: float  # that reading took
    readers: int  # cells that shared it
    engine: Engine | None = None  # of a cell that goes on from a cache of its own kind


def hold(
    model: Any, tokenizer: Any, ids: Tensor, cells: Sequence[Cell], long: bool, share: bool, question: str = ""
) -> list[Held]:
    """Read a text with every cell. ids [n]; question: what it is read for, where that is known"""
    by_pieces = len(ids) > trained_window(model)  # of methods that let no query see further than that
    apart = [cell for cell in cells if long or by_pieces or _in_windows(cell)]
    together = [cell for cell in cells if cell not in apart]
    found: dict[Cell, Held] = {}
    for group in [together] if share and together else [[cell] for cell in together]:
        found |= {held.cell: held for held in _shared(model, tokenizer, ids, group)}
    for cell in apart:
        found[cell] = _alone(model, tokenizer, ids, cell, long, question)
    return [found[cell] for cell in cells]


def _in_windows(cell: Cell) -> bool:
    recall = parse(cell[0]).recall
    return recall is not None and recall.window is not None


def _shared(model: Any, tokenizer: Any, ids: Tensor, cells: Sequence[Cell]) -> list[Held]:
    began = now(model.device)
    engines = [_engine(model, tokenizer, cell) if parse(cell[0]).recall else None for cell in cells]
    caches = [
        engine.cache if engine else Cache(model, method, budget, schedule="prompt")
        for engine, (method, budget) in zip(engines, cells, strict=True)
    ]
    for engine in filter(None, engines):
        engine.announce(ids)
    logits = read(model, ids[None].to(runs_on(model)), caches)
    for engine in filter(None, engines):
        engine.took(ids, logits[None])
    seconds = now(model.device) - began
    return [
        Held(cell, cache, cache.report(), logits, seconds, len(cells), engine)
        for cell, cache, engine in zip(cells, caches, engines, strict=True)
    ]


def _alone(model: Any, tokenizer: Any, ids: Tensor, cell: Cell, long: bool, question: str) -> Held:
    began = now(model.device)
    engine = _engine(model, tokenizer, cell, long)
    if question:
        engine.read_for(question, len(ids))
    logits = engine.prefill(ids)
    seconds, own = now(model.device) - began, long or engine.method.recall
    return Held(cell, engine.cache, engine.cache.report(), logits, seconds, 1, engine if own else None)


def _engine(model: Any, tokenizer: Any, cell: Cell, long: bool = True) -> Engine:
    """long: what it writes has to stay within the budget, too."""
    method = parse(cell[0])
    own = method.recall or (long and (method.scorer is None or method.schedule.every is not None))
    return Engine(model, tokenizer, method, cell[1], schedule=None if own else "buffer" if long else "prompt")


def rows(
    model: Any, held: Sequence[Held], room: int, share: bool, question: str = ""
) -> Iterator[tuple[list[int], Row]]:
    """Batches of cells to be asked, with room for so many tokens, each made when its turn comes.

    question: what they are going to be asked, where they did not know it when they read
    """
    mixed = [number for number, one in enumerate(held) if one.engine is None]
    sizes = [max(n for layer in held[number].report.tokens for n in layer[0]) + room for number in mixed]
    for pack in packs(sizes, _most(held), is_ragged(model)) if share else [[i] for i in range(len(mixed))]:
        numbers = [mixed[i] for i in pack]
        yield numbers, Together(model, [held[number].cache for number in numbers], room)
    own = [number for number, one in enumerate(held) if one.engine]
    for numbers in [own] if share and own else [[number] for number in own]:
        engines = [held[number].engine._fork() for number in numbers]
        for engine in engines if question else ():
            engine.read_for(question, engine.cache.seen)
        yield numbers, Abreast(model, engines)


def reporting(row: Row, held: Sequence[Held]) -> Callable[[], list[Held]]:
    """-> to be called when the row has answered: what each cell holds then; only engines hold more than they did"""
    engines = list(getattr(row, "engines", ()))  # a row takes leave of those that are done
    return lambda: [
        replace(one, report=engine.cache.report()) if engine else one
        for one, engine in zip(held, engines or [None] * len(held), strict=True)
    ]


def _most(held: Sequence[Held]) -> int:
    """How many slots, of all layers and key heads, a batch may have."""
    report = held[0].report
    return AT_ONCE.get(held[0].logits.device.type, AT_ONCE["cpu"]) // max(1, report.full_bytes // report.tokens_seen[0])
