"""After a prompt's attention: every layer's tokens compete, and the winners are stored.

Most methods decide layer by layer, so only one layer is ever held whole. A method that compares layers (`weigh`) has to
see them all first; its layers wait here, uncompressed, for the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from kvkeep.compress.method import Method
from kvkeep.compress.pipeline import compress, remember, shares
from kvkeep.compress.positions import Where
from kvkeep.model.rope import Rotation
from kvkeep.storage.ragged import LayerCache
from kvkeep.types import Observation, Selection, Tokens


@dataclass(frozen=True)
class Contestant:
    """One row of one layer: what was seen, and all its tokens. seen is None for a row without new tokens."""

    seen: Observation | None
    tokens: Tokens
    lengths: Sequence[int]
    competes: bool  # or only has its notes brought up to date


@dataclass
class Contest:
    method: Method
    budget: int | float
    store: dict[int, LayerCache]
    rotations: dict[int, Rotation | None]
    window: int  # the model's trained one

    def __post_init__(self) -> None:
        self.waiting: dict[int, list[Contestant]] = {}
        self.leaders: dict[int, Selection | None] = {}  # row -> the choice that following layers reuse

    def enter(self, index: int, rows: list[Contestant]) -> int:
        """Decide this layer, or all layers once the last has come. -> bytes of the keys and values held whole for it"""
        rows = [self._remembering(row) for row in rows]
        if self.method.layers.weigh is None:
            self._decide(index, rows, [None] * len(rows))
            return _bytes([rows])
        self.waiting[index] = rows
        whole = _bytes(self.waiting.values())
        if len(self.waiting) == len(self.store):
            waiting, self.waiting = self.waiting, {}
            each = [self._shares([layer[row] for layer in waiting.values()]) for row in range(len(rows))]
            for i, layer in enumerate(waiting):
                self._decide(layer, waiting[layer], [share and share[i] for share in each])
        return whole

    def _remembering(self, row: Contestant) -> Contestant:
        if row.seen is None or self.method.memory is None:
            return row
        seen = remember(row.seen, self.method, self._tokens(row.seen))
        return Contestant(seen, replace(row.tokens, notes=seen.notes), row.lengths, row.competes)

    def _tokens(self, seen: Observation) -> int:
        return self.method.tokens(self.budget, seen.cursor)

    def _shares(self, layers: list[Contestant]) -> list[int] | None:
        """One row's budget in every layer."""
        if not layers[0].competes:
            return None
        budget = self._tokens(layers[0].seen)
        weights = [float(self.method.layers.weigh(layer.seen, budget)) for layer in layers]
        return shares(self.method, budget, layers[0].seen.cursor, weights)

    def _decide(self, index: int, rows: list[Contestant], shares: Sequence[int | None]) -> None:
        winners = []
        for number, (row, share) in enumerate(zip(rows, shares, strict=True)):
            chosen = self._choice(number, row.seen, share) if row.competes else None
            kept = picked(row.tokens, row.lengths, chosen)
            winners.append(self._placed(index, row.seen, kept) if chosen and self.method.place else kept)
        self.store[index].fill(winners)

    def _choice(self, row: int, seen: Observation, share: int | None) -> Selection | None:
        if seen.layer % self.method.reuse == 0:
            self.leaders[row] = compress(seen, self.method, self._tokens(seen), share)
        return self.leaders[row]

    def _placed(self, index: int, seen: Observation, heads: list[Tokens]) -> list[Tokens]:
        """Move the kept keys to where the method wants them."""
        moved = []
        for head in heads:
            places = self.method.place(Where(head.positions, seen.cursor, self._tokens(seen), self.window))
            by = places - head.places
            turn = self.rotations[index]
            moved.append(
                replace(head, keys=turn.turn(head.keys, by) if turn else head.keys, places=places.to(head.places.dtype))
            )
        return moved

    def forget(self) -> None:
        """Drop what a broken forward pass left waiting."""
        self.waiting, self.leaders = {}, {}


def _bytes(layers: Iterable[list[Contestant]]) -> int:
    return sum(row.tokens.keys.nbytes + row.tokens.values.nbytes for rows in layers for row in rows)


def picked(tokens: Tokens, lengths: Sequence[int], chosen: Selection | None) -> list[Tokens]:
    """The chosen tokens of each key head; all of them where nothing was chosen. A leader may be on another device."""
    if chosen is None:
        return [tokens.map(lambda t, h=h, n=n: t[h, :n]) for h, n in enumerate(lengths)]
    index = chosen.index.to(tokens.keys.device)
    if len(set(chosen.lengths)) == 1:
        heads = torch.arange(len(chosen.lengths), device=index.device)[:, None]
        together = tokens.map(lambda t: t[heads, index])
        return [together.map(lambda t, h=h: t[h]) for h in range(len(chosen.lengths))]
    return [tokens.map(lambda t, h=h, n=n: t[h][index[h, :n]]) for h, n in enumerate(chosen.lengths)]
