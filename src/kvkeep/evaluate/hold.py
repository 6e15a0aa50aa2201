"""A text read with many methods and budgets, ready to be asked: what each kept, and rows that answer together.

Methods that drop tokens share one forward pass over the text, and answer side by side in one batch; nothing of a
question or an answer is dropped or counted, whatever the method. Methods that fetch, and long answers that have to stay
within the budget, read and write alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kvkeep.compress.method import parse
from kvkeep.engine.fan import read
from kvkeep.engine.generate import Engine
from kvkeep.engine.report import Report
from kvkeep.engine.session import Cache
from kvkeep.engine.slots import Together, is_ragged, packs

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
    engine: Engine | None = None  # of a cell that answers alone


def hold(model: Any, tokenizer: Any, ids: Tensor, cells: Sequence[Cell], long: bool, share: bool) -> list[Held]:
    """Read a text with every cell. ids [n]"""
    apart = [cell for cell in cells if long or parse(cell[0]).recall]
    together = [cell for cell in cells if cell not in apart]
    found: dict[Cell, Held] = {}
    for group in [together] if share and together else [[cell] for cell in together]:
        found |= {held.cell: held for held in _shared(model, ids, group)}
    for cell in apart:
        found[cell] = _alone(model, tokenizer, ids, cell)
    return [found[cell] for cell in cells]


def _shared(model: Any, ids: Tensor, cells: Sequence[Cell]) -> list[Held]:
    began = time.perf_counter()
    caches = [Cache(model, method, budget, schedule="prompt") for method, budget in cells]
    logits = read(model, ids[None].to(model.device), caches)
    seconds = time.perf_counter() - began
    return [
        Held(cell, cache, cache.report(), logits, seconds, len(cells))
        for cell, cache in zip(cells, caches, strict=True)
    ]


def _alone(model: Any, tokenizer: Any, ids: Tensor, cell: Cell) -> Held:
    began = time.perf_counter()
    method = parse(cell[0])
    fixed = method.recall or method.scorer is None or method.schedule.every is not None
    engine = Engine(model, tokenizer, method, cell[1], schedule=None if fixed else "buffer")
    logits = engine.read(ids)
    return Held(cell, engine.cache, engine.cache.report(), logits, time.perf_counter() - began, 1, engine)


def rows(model: Any, held: Sequence[Held], room: int, share: bool) -> Iterator[tuple[list[int], Row]]:
    """Batches of cells to be asked, with room for so many tokens, each made when its turn comes.

    Whoever answers alone is a batch of one.
    """
    mixed = [number for number, one in enumerate(held) if one.engine is None]
    sizes = [max(n for layer in held[number].report.tokens for n in layer[0]) + room for number in mixed]
    for pack in packs(sizes, _most(held), is_ragged(model)) if share else [[i] for i in range(len(mixed))]:
        numbers = [mixed[i] for i in pack]
        yield numbers, Together(model, [held[number].cache for number in numbers], room)
    for number, one in enumerate(held):
        if one.engine:
            yield [number], Alone(one.engine.fork())


def _most(held: Sequence[Held]) -> int:
    """How many slots, of all layers and key heads, a batch may have."""
    report = held[0].report
    return AT_ONCE.get(held[0].logits.device.type, AT_ONCE["cpu"]) // max(1, report.full_bytes // report.tokens_seen[0])


@dataclass
class Alone:
    """One row with a cache of its own kind."""

    engine: Engine

    def feed(self, ids: Tensor, keep: int = 1) -> Tensor:
        return self.engine.feed(ids[0], keep)[None]

    def take(self, rows: Sequence[int]) -> None:
        """There is only one."""
