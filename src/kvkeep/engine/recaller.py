"""Reading and writing without dropping anything: every window of queries fetches what it asks for.

One layer of one pass: tokens that left the near window are put away, the window's queries say which units they want,
these come back, and one softmax goes over sinks, fetched and near tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvkeep.cache.host import Host, Pair, Purse
from kvkeep.cache.shelf import Fetched, Shelf, grown
from kvkeep.compress.method import Method
from kvkeep.compress.recall.fetch import by_unit, density_share, match_entropy, spend, spend_even
from kvkeep.compress.recall.index import Asking, EachToken, Leaving
from kvkeep.compress.recall.probe import Moments, joined
from kvkeep.engine.arrival import Arrival
from kvkeep.engine.turns import Turns
from kvkeep.errors import CacheMisuse
from kvkeep.kernels.reference import attend_apart
from kvkeep.model.attention import Handover
from kvkeep.model.rotary import Rotation


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
            output, shelf = self._row(Layer(self, index, row, new, arrival.is_step), shelf, q, k, v, quiet=plain)
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
        outputs = []
        for start in range(0, q.shape[1], size):
            here = slice(start, start + size)
            output, shelf = layer.window(shelf, q[:, here], k[:, here], v[:, here], quiet)
            outputs.append(output)
        budget = self.method.tokens(self.budget, shelf.seen)
        if shelf.seen > budget:
            shelf = layer.put_away(shelf, budget)
        return (None if quiet or not outputs else torch.cat(outputs, 1)), shelf

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

    def tell(self, row: int, marks: Tensor) -> None:
        """What the text says of the row's next tokens: how surprising they are, or which end a sentence. [n]"""
        while len(self.marks) <= row:
            self.marks.append(torch.empty(0))
        self.marks[row] = torch.cat([self.marks[row], marks.detach().float().cpu()])

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
                self.shelves[j][row] = replace(shelf, worth=None, density=(match_entropy(shelf.worth), 0))
        return [density and density[0] for density in (self.shelves[j][row].density for j in layers)]

    def take(self, rows: Sequence[int]) -> None:
        self.shelves = {i: [shelves[row] for row in rows] for i, shelves in self.shelves.items()}
        self.marks = [self.marks[row] for row in rows] if self.marks else []


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

    def window(self, shelf: Shelf, q: Tensor, k: Tensor, v: Tensor, quiet: bool) -> tuple[Tensor | None, Shelf]:
        """A window of queries q [heads, w, dim] with their own keys and values [kv_heads, w, dim]."""
        budget = self.all.method.tokens(self.all.budget, shelf.seen + q.shape[1])
        sizes, far = self.recall.sizes(budget), None
        fetched: list[Pair] = []
        reading_whole = self.recall.window is None and not self.writing
        if shelf.seen + q.shape[1] > budget and not reading_whole:
            shelf = self.put_away(shelf, budget, brief=True)
        turned = self._turned(q, shelf.seen, sizes.near)
        together = None
        if self.recall.index.wants_moments:
            together = joined(turned, len(k))
            mine = Moments.of(together)
            shelf = replace(shelf, moments=shelf.moments.joined(mine) if shelf.moments else mine)
        if shelf.host.tokens:
            shelf = replace(shelf, fetched=None) if reading_whole else self._choose(shelf, turned, together, budget)

            def far() -> Pair:
                fetched.append(self._away(shelf, reading_whole))
                return self._far(shelf, fetched[0])

        near = tuple(torch.cat([old, new.to(old.dtype)], 1) for old, new in zip(shelf.near, (k, v), strict=True))
        output = mass = None
        band = sizes.near if self.recall.index.wants_mass else 0
        if band or not quiet:
            meets = turned if self.recall.far == "edge" else q
            new = self.new
            output, mass = attend_apart(q, meets, far, near, new.scale, new.softcap, new.sinks, band)
        if fetched and shelf.fetched:
            shelf = replace(shelf, fetched=replace(shelf.fetched, pair=fetched[0]))
        if mass is not None and shelf.mass is not None:
            mass[: len(shelf.mass)] += shelf.mass
        return output, replace(shelf, near=near, mass=mass, seen=shelf.seen + q.shape[1])

    def _turned(self, q: Tensor, seen: int, edge: int) -> Tensor:
        """Queries as if they all stood `edge` behind a key without position."""
        if not self.recall.moves:
            return q
        return self.all.turns.gathered(self.index, q, seen, edge)

    def put_away(self, shelf: Shelf, budget: int, brief: bool = False) -> Shelf:
        """Let go of what is no longer near, in whole units. brief: what stays will be copied anyway"""
        sizes, recall = self.recall.sizes(budget), self.recall
        sinks = 0 if shelf.sinks else sizes.sinks
        waiting = shelf.nearby - sinks - sizes.near
        if waiting <= 0:
            return shelf
        marks = self.all.told(self.row, shelf.first + sinks, waiting)
        ready = recall.cut.ready(marks, waiting, budget)
        if ready <= 0:
            return shelf
        keys, values = (part[:, : sinks + ready] for part in shelf.near)
        keys = self.all.turns.back(self.index, keys, shelf.first) if recall.moves else keys
        near = tuple(part[:, sinks + ready :] for part in shelf.near)
        mass = None if shelf.mass is None else shelf.mass[sinks : sinks + ready]
        shelf, leaving = self._noted(shelf, Leaving(keys[:, sinks:], mass, None, 0), values[:, sinks:], marks, budget)
        return replace(
            shelf,
            near=near if brief else tuple(part.clone() for part in near),
            mass=None if shelf.mass is None else shelf.mass[sinks + ready :],
            sinks=shelf.sinks or (keys[:, :sinks].clone(), values[:, :sinks].clone()),
            host=shelf.host.put(*leaving),
        )

    def _noted(
        self, shelf: Shelf, leaving: Leaving, values: Tensor, marks: Tensor | None, budget: int
    ) -> tuple[Shelf, Pair]:
        """Cut tokens that leave into units and note what has to be known of them. -> also: them, unit after unit"""
        recall, keys = self.recall, leaving.keys
        ready, pair, where = keys.shape[1], (keys, values), shelf.where
        even = recall.cut.size(budget) if recall.cut.even else 0
        if even:
            leaving = replace(leaving, count=ready // even)
        else:
            member = recall.cut.members(keys, None if marks is None else marks[:ready].to(keys.device), budget)
            order, size = by_unit(member)
            leaving = replace(leaving, member=member, count=size.shape[1])
        if not recall.cut.in_order:
            pair = tuple(_in_order(part, order) for part in pair)
            first = shelf.host.tokens + (shelf.sinks[0].shape[1] if shelf.sinks else recall.sizes(budget).sinks)
            where = grown(where, torch.arange(first, first + ready, dtype=torch.int32, device=keys.device)[order])
        about = recall.index.describe(leaving)
        shelf = replace(shelf, about=shelf.about if about is None else grown(shelf.about, about), where=where)
        if even and even == (shelf.even if shelf.host.tokens else even):
            return replace(shelf, even=even), pair
        size = torch.full((1, leaving.count), even, device=keys.device) if even else size
        return replace(shelf, even=0, sizes=grown(shelf.each_size, size)), pair

    def _away(self, shelf: Shelf, everything: bool) -> Pair:
        """What was chosen of the tokens put away, or all of them."""
        if everything:
            return shelf.host.everything()
        return shelf.fetched.pair or shelf.host.fetch(shelf.fetched.index, self._unit)

    @property
    def _unit(self) -> int:
        """Tokens of every unit, where a budget in tokens makes them all the same; else 1."""
        return self.recall.cut.whole(self.all.budget) if isinstance(self.all.budget, int) else 1

    def _far(self, shelf: Shelf, pair: Pair) -> Pair:
        """Sinks and what is fetched, as attention meets them."""
        keys, values = (torch.cat(both, 1) for both in zip(shelf.sinks, pair, strict=True))
        if self.recall.far == "side by side":
            keys = self.all.turns.to(self.index, keys, shelf.first - keys.shape[1])
        return keys, values

    def _choose(self, shelf: Shelf, turned: Tensor, together: Tensor | None, budget: int) -> Shelf:
        """Let the window's queries say which units they want."""
        recall, kv_heads = self.recall, len(shelf.near[0])
        probe = joined(turned, kv_heads).mean(0) if recall.similar is not None else None
        last = shelf.fetched
        again = last is not None and probe is not None and self.writing
        if again and float(cosine_similarity(probe, last.probe, 0)) >= recall.similar:
            return shelf
        question = self.all.question.get(self.index)
        asking = Asking(turned, kv_heads, self.new.scale, shelf.moments, question, not self.writing, together)
        about = shelf.host.keys() if isinstance(recall.index, EachToken) else torch.cat(shelf.about, 1)
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
        return replace(shelf, fetched=Fetched(probe, index, last.pair if same else None))

    def _quota(self, shelf: Shelf, budget: int) -> int:
        """Tokens the budget leaves to be fetched, in whole units where all are of one size."""
        left = max(0, budget - shelf.sinks[0].shape[1] - shelf.nearby - self.writing)
        unit = self.recall.cut.whole(budget)
        return left // unit * unit

    def _share(self, shelf: Shelf, worth: Tensor, quota: int, budget: int) -> tuple[Shelf, int]:
        """While writing, layers share what all of them may fetch; ActQKV's information density."""
        if not self.writing:
            return replace(shelf, worth=worth), quota
        now, layers = match_entropy(worth), self.all.owned
        left = self.all.left.setdefault(self.row, len(layers) * quota)
        later = self.all.densities(layers[layers.index(self.index) + 1 :], self.row)
        share = density_share(
            now, [now if mean is None else mean for mean in later], left, self.recall.cut.whole(budget)
        )
        self.all.left[self.row] = left - share
        mean, steps = (shelf.density if shelf.worth is None else None) or (0.0, 0)
        mean = (mean * steps + now) / (steps + 1)
        return replace(shelf, worth=None, density=(mean, steps + 1)), share


def _in_order(tokens: Tensor, order: Tensor) -> Tensor:
    """tokens [kv_heads, n, dim] by order [1 or kv_heads, n]"""
    return tokens.gather(1, order.expand(len(tokens), -1)[..., None].expand_as(tokens))
