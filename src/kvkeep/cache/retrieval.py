"""Reading and writing without dropping anything: every window of queries fetches what it asks for.

One layer of one pass: tokens that left the near window are put away, the window's queries say which units they want,
these come back, and one softmax goes over sinks, fetched and near tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvkeep.cache.padding import Arrival
from kvkeep.cache.rope_shift import Turns
from kvkeep.compress.method import Method
from kvkeep.compress.retrieval.index import Asking, EachToken, Leaving
from kvkeep.compress.retrieval.query import joined, surprised
from kvkeep.compress.retrieval.topk import by_unit, density, density_share, spend, spend_even
from kvkeep.errors import CacheMisuse
from kvkeep.kernels.dispatch import attend_apart
from kvkeep.model.hf_attention import Handover
from kvkeep.model.rope import Rotation
from kvkeep.storage.offload.host import Host, Pair, Purse
from kvkeep.storage.offload.layer_state import Fetched, Pile, Shelf, grown


@dataclass
class Recaller:
    method: Method
    budget: int | float
    rotations: dict[int, Rotation | None]
    owned: list[int]
    purse: Purse

    def __post_init__(self) -> None:
        self.recall = self.method.recall
        self.turns = Turns(self.rotations)
        self.shelves: dict[int, list[Shelf]] = {}  # layer -> one per row
        self.fresh: dict[int, list[Shelf]] = {}  # of the pass under way
        self.left: dict[int, int] = {}  # row -> tokens that later layers may still fetch in this step
        self.marks: list[Tensor] = []  # per row, what the text tells of each token
        self.question: dict[int, Tensor] = {}  # layer -> [x, kv_heads * dim] what the text is read for

    def attend(self, index: int, new: Handover, arrival: Arrival) -> tuple[Tensor, Tensor | None]:
        """What attention functions return, for one layer of one pass."""
        before = self.shelves.get(index) or [self._empty(new) for _ in arrival.counts]
        plain = not any(shelf.seen for shelf in before) and all(map(self.fits, arrival.counts))
        outputs, after = [], []
        for row, shelf in enumerate(before):
            q, k, v = (arrival.real(t, row).detach() for t in (new.query, new.key, new.value))
            layer = Layer(self, index, row, new, writing=arrival.counts[row] == 1 and shelf.seen > 0)
            with torch.no_grad():  # what is kept carries no graph
                output, shelf = self._row(layer, shelf, q, k, v, quiet=plain)
            outputs.append(output)
            after.append(shelf)
        self.fresh[index] = after
        if plain:
            return new.stock()
        return new.outcome(self._spread(outputs, new.query, new.value.shape[-1], arrival))

    def fits(self, count: int) -> bool:
        """A first pass that the model's own attention can do."""
        return self.recall.window is None or count <= self.method.tokens(self.budget, count)

    def _empty(self, new: Handover) -> Shelf:
        near = tuple(t[0, :, :0].detach() for t in (new.key, new.value))
        return Shelf(near, Host(self.purse, new.key.device))

    def _row(
        self, layer: Layer, shelf: Shelf, q: Tensor, k: Tensor, v: Tensor, quiet: bool
    ) -> tuple[Tensor | None, Shelf]:
        """One row's new tokens, window by window. quiet: nobody needs the output"""
        size = self.recall.window or max(1, q.shape[1])
        piece, outputs = Piece(layer, shelf, q, k, v), []
        for start in range(0, q.shape[1], size):
            output, shelf = layer.window(shelf, piece, start, min(start + size, q.shape[1]), quiet)
            outputs.append(output)
        budget = self.method.tokens(self.budget, shelf.seen)
        if shelf.seen > budget and not layer.settled(shelf):
            shelf = layer.put_away(shelf, piece, budget)
            if shelf.device_tokens > budget:
                shelf = shelf.but(fetched=None)  # for a window with less near it
        if shelf.nearby < piece.near[0].shape[1]:  # a part of what is no longer needed
            shelf = shelf.but(near=tuple(part.clone() for part in shelf.near))
        if quiet or not outputs:
            return None, shelf
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), shelf

    def _spread(self, outputs: list[Tensor | None], like: Tensor, width: int, arrival: Arrival) -> Tensor:
        """Rows back where they came from, zeros for padding. [rows, heads, q, dim]"""
        if arrival.columns is None and len(outputs) == 1 and outputs[0] is not None:
            return outputs[0][None]
        spread = like.new_zeros(*like.shape[:3], width)
        for row, output in enumerate(outputs):
            if output is not None:
                columns = slice(None) if arrival.columns is None else arrival.columns[row]
                spread[row, :, columns] = output
        return spread

    def tell(self, row: int, marks: Tensor, first: int | None = None) -> None:
        """What the text says of the row's next tokens: how surprising they are, or which end a sentence. [n]

        first: place of the first of them; what was said of it and later ones before a pass was cut short is forgotten
        """
        while len(self.marks) <= row:
            self.marks.append(torch.empty(0))
        self.marks[row] = torch.cat([self.marks[row][:first], marks.detach().float().cpu()])

    def told(self, row: int, first: int, count: int) -> Tensor | None:
        if not self.recall.needs:
            return None
        marks = self.marks[row][first : first + count] if row < len(self.marks) else torch.empty(0)
        if len(marks) < count:
            raise CacheMisuse(
                f"'{self.method.name}' cuts text by {self.recall.needs}, which a cache cannot see; use kvkeep.Engine."
            )
        return marks

    def begin(self) -> None:
        """A forward pass begins."""
        self.forget()
        self.turns.begin()
        self.left = {}

    def finish(self) -> None:
        """It went through: what it made counts."""
        self.shelves.update(self.fresh)
        self.forget()

    def forget(self) -> None:
        self.fresh = {}

    def densities(self, layers: Sequence[int], row: int) -> list[float | None]:
        """Mean entropy of the matches so far; of those made while reading, only the last counts."""
        for j in layers:
            shelf = self.shelves[j][row]
            if shelf.worth is not None:  # a number only now that somebody asks: a GPU would have to be waited for
                self.shelves[j][row] = shelf.but(worth=None, density=(self.density(shelf.worth), 0))
        return [known and known[0] for known in (self.shelves[j][row].density for j in layers)]

    def density(self, worth: Tensor) -> float:
        return density(worth, self.recall.density == "reverse")

    def take(self, rows: Sequence[int]) -> None:
        self.shelves = {i: [shelves[row] for row in rows] for i, shelves in self.shelves.items()}
        self.marks = [self.marks[row] for row in rows] if self.marks else []


class Piece:
    """What a pass brings to a layer of a row, behind what was near before. What its windows share is made once."""

    def __init__(self, layer: Layer, shelf: Shelf, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.layer, self.queries, self.seen, self.first = layer, q, shelf.seen, shelf.first
        self.whole: Tensor | None = None  # all queries turned
        # keys and values from place `first` of the text on, [kv_heads, n, dim]
        self.near = tuple(torch.cat([old, new.to(old.dtype)], 1) for old, new in zip(shelf.near, (k, v), strict=True))

    @cached_property
    def bare(self) -> Tensor:
        """These keys as they are put away."""
        keys, layer = self.near[0], self.layer
        return layer.all.turns.back(layer.index, keys, self.first) if layer.recall.moves else keys

    def turned(self, start: int, end: int, near: int) -> Tensor:
        """Queries from start to end as far keys meet them: at the edge of a near window of this size."""
        layer = self.layer
        if not layer.recall.moves:
            return self.queries[:, start:end]
        if not isinstance(layer.all.budget, int):  # it grows from window to window
            return self._at_edge(start, end, near)
        if self.whole is None:
            self.whole = self._at_edge(0, self.queries.shape[1], near)
        return self.whole[:, start:end]

    def _at_edge(self, start: int, end: int, near: int) -> Tensor:
        layer = self.layer
        return layer.all.turns.gathered(layer.index, self.queries[:, start:end], self.seen + start, near)


@dataclass(frozen=True)
class Layer:
    """One layer of one row in one pass."""

    all: Recaller
    index: int
    row: int
    new: Handover
    writing: bool  # a single token on top of others

    @property
    def recall(self):
        return self.all.recall

    def window(self, shelf: Shelf, piece: Piece, start: int, end: int, quiet: bool) -> tuple[Tensor | None, Shelf]:
        """The queries from start to end."""
        recall, q, seen = self.recall, piece.queries[:, start:end], shelf.seen + end - start
        budget = self.all.method.tokens(self.all.budget, seen)
        sizes, far = recall.sizes(budget), None
        reading_whole = recall.window is None and not self.writing
        if seen > budget and not reading_whole and not self.settled(shelf):
            shelf = self.put_away(shelf, piece, budget)
        turned = piece.turned(start, end, sizes.near)
        probe = None
        if recall.index.wants_moments:
            question = None if self.writing or not recall.index.joins else self.all.question.get(self.index)
            moments, probe = surprised(turned, len(piece.near[0]), shelf.moments, question, recall.index.reverse)
            shelf = shelf.but(moments=moments)
        if shelf.host.tokens:
            shelf = shelf.but(fetched=None) if reading_whole else self._choose(shelf, turned, probe, budget)

            def far() -> Pair:
                nonlocal shelf
                pair, shelf = self._far(shelf, reading_whole)
                return pair

        begin, nearby = shelf.first - piece.first, seen - shelf.first
        near = piece.near[0].narrow(1, begin, nearby), piece.near[1].narrow(1, begin, nearby)
        output = mass = None
        band = sizes.near if recall.index.wants_mass else 0
        if band or not quiet:
            meets, new = turned if recall.far == "edge" else q, self.new
            rest = new.scale, new.softcap, new.sinks, band, shelf.mass, recall.index.per_head
            output, mass = attend_apart(q, meets, far, near, *rest)
        return output, shelf.but(near=near, mass=mass, seen=seen)

    def settled(self, shelf: Shelf) -> bool:
        """What this text's first written token fetched stays, and so does all that is near."""
        return self.recall.once and self.writing and shelf.fetched is not None

    def put_away(self, shelf: Shelf, piece: Piece, budget: int) -> Shelf:
        """Let go of what is no longer near, in whole units."""
        sizes, recall = self.recall.sizes(budget), self.recall
        sinks = 0 if shelf.sinks else sizes.sinks
        waiting = shelf.nearby - sinks - sizes.near
        if waiting <= 0:
            return shelf
        marks = self.all.told(self.row, shelf.first + sinks, waiting)
        ready = recall.cut.ready(marks, waiting, budget)
        if ready <= 0:
            return shelf
        end, near, mass = sinks + ready, shelf.near, shelf.mass
        keys, values = piece.bare.narrow(1, shelf.first - piece.first, end), near[1].narrow(1, 0, end)
        leaving = (keys, values) if shelf.sinks else (keys[:, sinks:], values[:, sinks:])
        shelf, leaving = self._noted(shelf, *leaving, None if mass is None else mass[..., sinks:end], marks, budget)
        first = shelf.sinks or tuple(t[:, :sinks].clone(memory_format=torch.contiguous_format) for t in (keys, values))
        return shelf.but(
            near=tuple(part.narrow(1, end, shelf.nearby - end) for part in near),
            mass=None if mass is None else mass[..., end:],
            sinks=first,
            host=shelf.host.put(*leaving),
        )

    def _noted(
        self, shelf: Shelf, keys: Tensor, values: Tensor, mass: Tensor | None, marks: Tensor | None, budget: int
    ) -> tuple[Shelf, Pair]:
        """Cut tokens that leave into units and note what has to be known of them. -> also: them, unit after unit"""
        recall, ready, pair, where = self.recall, keys.shape[1], (keys, values), shelf.where
        even = recall.cut.size(budget) if recall.cut.even else 0
        count, member = ready // even if even else 0, None
        if not even:
            member = recall.cut.members(keys, None if marks is None else marks[:ready].to(keys.device), budget)
            order, size = by_unit(member)
            count = size.shape[1]
        if not recall.cut.in_order:
            pair = tuple(_in_order(part, order) for part in pair)
            first = shelf.host.tokens + (shelf.sinks[0].shape[1] if shelf.sinks else recall.sizes(budget).sinks)
            where = grown(where, torch.arange(first, first + ready, dtype=torch.int32, device=keys.device)[order])
        about = self._described(shelf.about, keys, mass, member, count)
        if even and even == (shelf.even if shelf.host.tokens else even):
            return shelf.but(about=about, where=where, even=even), pair
        size = torch.full((1, count), even, device=keys.device) if even else size
        return shelf.but(about=about, where=where, even=0, sizes=grown(shelf.each_size, size)), pair

    def _described(
        self, about: Pile | None, keys: Tensor, mass: Tensor | None, member: Tensor | None, count: int
    ) -> Pile | None:
        """What is known of all units, now that more of them leave."""
        grown = about.more(count) if about else None
        room = grown.last(count) if grown else None
        new = self.recall.index.describe(Leaving(keys, mass, member, count, room))
        if new is None or new is room:
            return grown
        grown = grown or Pile.like(new, keys.dtype).more(count)
        grown.last(count).copy_(new)
        return grown

    def _far(self, shelf: Shelf, everything: bool) -> tuple[Pair, Shelf]:
        """Sinks and what was chosen of the tokens put away, or all of them, as attention meets them."""
        sinks, first = shelf.sinks, shelf.sinks[0].shape[1]
        if everything or shelf.fetched.pair:
            known = shelf.host.everything() if everything else shelf.fetched.pair
            keys, values = (torch.cat(both, 1) for both in zip(sinks, known, strict=True))
        else:
            asked = shelf.fetched
            keys, values = shelf.host.fetch(asked.index, self._unit, sinks)
            pair = tuple(t.narrow(1, first, t.shape[1] - first) for t in (keys, values))
            shelf = shelf.but(fetched=Fetched(asked.probe, asked.index, pair))
        if self.recall.far == "side by side":
            keys = self.all.turns.to(self.index, keys, shelf.first - keys.shape[1])
        return (keys, values), shelf

    @property
    def _unit(self) -> int:
        """Tokens of every unit, where a budget in tokens makes them all the same; else 1."""
        return self.recall.cut.whole(self.all.budget) if isinstance(self.all.budget, int) else 1

    def _choose(self, shelf: Shelf, turned: Tensor, asks: Tensor | None, budget: int) -> Shelf:
        """Let the window's queries say which units they want; asks: their probe, where it is known."""
        if self.settled(shelf):
            return shelf
        recall, last, kv_heads = self.recall, shelf.fetched, shelf.near[0].shape[0]
        probe = joined(turned, kv_heads).mean(0) if recall.similar is not None else None
        again = last is not None and probe is not None and self.writing
        if again and float(cosine_similarity(probe, last.probe, 0)) >= recall.similar:
            return shelf
        question = self.all.question.get(self.index)
        asking = Asking(turned, kv_heads, self.new.scale, shelf.moments, question, not self.writing, asks)
        about = shelf.host.keys() if isinstance(recall.index, EachToken) else shelf.about.all
        alike = shelf.even and not recall.index.wants_sizes and not recall.neighbours
        worth = recall.index.worth(asking, about, None if alike else torch.cat(shelf.each_size, 1))
        quota = self._quota(shelf, budget)
        if recall.density:
            shelf, quota = self._share(shelf, worth, quota, budget)
        if alike and quota % shelf.even == 0:
            index = spend_even(worth, shelf.even, quota)
        else:
            sizes = torch.cat(shelf.each_size, 1).expand(len(worth), -1)
            index = spend(worth, sizes, quota, recall.neighbours).index
        looks = self.writing or index.device.type == "cpu"  # a GPU would have to be waited for, in vain while reading
        same = looks and last is not None and index.equal(last.index)
        return shelf.but(fetched=Fetched(probe, index, last.pair if same else None))

    def _quota(self, shelf: Shelf, budget: int) -> int:
        """Tokens the budget leaves to be fetched, in whole units where all are of one size."""
        left = max(0, budget - shelf.sinks[0].shape[1] - shelf.nearby - self.writing)
        unit = self.recall.cut.whole(budget)
        return left // unit * unit

    def _share(self, shelf: Shelf, worth: Tensor, quota: int, budget: int) -> tuple[Shelf, int]:
        """While writing, layers share what all of them may fetch; ActQKV's information density."""
        if not self.writing:
            return shelf.but(worth=worth), quota
        now, layers = self.all.density(worth), self.all.owned
        left = self.all.left.setdefault(self.row, len(layers) * quota)
        later = self.all.densities(layers[layers.index(self.index) + 1 :], self.row)
        share = density_share(
            now, [now if mean is None else mean for mean in later], left, self.recall.cut.whole(budget)
        )
        self.all.left[self.row] = left - share
        mean, steps = (shelf.density if shelf.worth is None else None) or (0.0, 0)
        mean = (mean * steps + now) / (steps + 1)
        return shelf.but(worth=None, density=(mean, steps + 1)), share


def _in_order(tokens: Tensor, order: Tensor) -> Tensor:
    """tokens [kv_heads, n, dim] by order [1 or kv_heads, n]"""
    return tokens.gather(1, order.expand(len(tokens), -1)[..., None].expand_as(tokens))
