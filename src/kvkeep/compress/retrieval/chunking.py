"""Which tokens are put away together. Every cut says how many of the tokens on their way out are ready to go.

`ready` gets what is known of the tokens beyond the near window (oldest first), `members` the keys of those that go;
`whole` is the size units are fetched in where all have the same, else 1. `in_order`: units are stretches of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.errors import BadParameter
from kvkeep.kernels.dispatch import assign, means
from kvkeep.types import Observation


@dataclass(frozen=True)
class Chunks:
    """Equal stretches of text."""

    chunk: int | None = None
    usual: int = 32  # where nobody says; an 8th of the budget at most
    in_order = even = True  # even: all units are of one size

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise BadParameter(f"chunk={self.chunk} must hold at least one token.")

    def size(self, budget: int) -> int:
        return self.chunk or max(1, min(self.usual, budget // 8))

    whole = size

    def ready(self, marks: Tensor | None, waiting: int, budget: int) -> int:
        return waiting // self.size(budget) * self.size(budget)

    def members(self, keys: Tensor, marks: Tensor | None, budget: int) -> Tensor:
        """[1, n] unit of each token"""
        return (torch.arange(keys.shape[1], device=keys.device) // self.size(budget))[None]


@dataclass(frozen=True)
class Clusters:
    """Keys alike, wherever they stood: k-means by cosine, one clustering per key head. Deterministic.

    The first centres are tokens at equal distances in the text.
    """

    tokens: int = 80  # per cluster, on average
    pack: int | None = None  # written tokens that are clustered together
    iterations: int = 20
    usual: int = 320
    in_order = even = False

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.iterations < 0:
            raise BadParameter(f"tokens={self.tokens}, iterations={self.iterations}: use 1 or more, and 0 or more.")

    def size(self, budget: int) -> int:
        return self.pack or max(1, min(self.usual, budget // 4))

    ready = Chunks.ready

    def whole(self, budget: int) -> int:
        return 1

    def members(self, keys: Tensor, marks: Tensor | None, budget: int) -> Tensor:
        """[kv_heads, n] cluster of each token"""
        n = keys.shape[1]
        count = max(1, n // self.tokens)
        first = torch.arange(count, device=keys.device) * n // count
        return kmeans(keys, first, self.iterations)[0]


@dataclass(frozen=True)
class Grouped:
    """The clusters of a method that evicts whole clusters."""

    group: Callable
    pack: int | None = None
    usual: int = 128
    in_order = even = False

    size, ready, whole = Clusters.size, Chunks.ready, Clusters.whole

    def members(self, keys: Tensor, marks: Tensor | None, budget: int) -> Tensor:
        heads, n, dim = keys.shape
        where = torch.arange(n, device=keys.device).expand(heads, -1)
        seen = Observation(keys[:, :0], keys, keys, where, (n,) * heads, n, n, dim**-0.5)
        return compacted(self.group.members(seen))


@dataclass(frozen=True)
class Marked:
    """Stretches that end where a mark says so: sentences. Too long a stretch is cut."""

    longest: int = 128
    in_order, even = True, False
    whole = Clusters.whole

    def size(self, budget: int) -> int:
        return max(1, min(self.longest, budget // 8))

    def ready(self, marks: Tensor | None, waiting: int, budget: int) -> int:
        """All that lies before a mark, and what has waited for one too long."""
        ends = (marks[:waiting] > 0).nonzero()
        last = int(ends[-1]) + 1 if len(ends) else 0
        longest = self.size(budget)
        return last + (waiting - last) // longest * longest

    def members(self, keys: Tensor, marks: Tensor | None, budget: int) -> Tensor:
        return stretches(marks > 0, self.size(budget))[None]


@dataclass(frozen=True)
class Events:
    """EM-LLM: a new event begins where the text surprises, moved to where the keys on both sides differ most.

    Surprises are compared with those before them in their piece of the text.
    """

    gamma: float = 1.0
    longest: int = 128
    shortest: int = 8
    refine: bool = True
    in_order, even = True, False

    def size(self, budget: int) -> int:
        """Text is cut into events in pieces of this size; an event ends with its piece at the latest."""
        return max(1, min(4 * self.longest, budget // 4))

    ready, whole = Chunks.ready, Clusters.whole

    def members(self, keys: Tensor, marks: Tensor | None, budget: int) -> Tensor:
        piece = self.size(budget)
        numbers, before = [], 0
        for first in range(0, keys.shape[1], piece):
            here = slice(first, first + piece)
            numbers.append(before + self._events(keys[:, here], marks[here].tolist(), piece))
            before = int(numbers[-1][-1]) + 1
        return torch.cat(numbers)[None]

    def _events(self, keys: Tensor, surprise: list[float], piece: int) -> Tensor:
        """Numbers of the events in one piece. [n]"""
        starts = boundaries(surprise, self.gamma, piece)
        if self.refine:
            starts = refined(starts, similarity(keys))
        kept = [0]
        for start in starts[1:]:
            if start - kept[-1] >= self.shortest:
                kept.append(start)
        ends = torch.zeros(keys.shape[1], dtype=torch.bool, device=keys.device)
        ends[torch.tensor([start - 1 for start in kept[1:]], dtype=torch.long, device=keys.device)] = True
        return stretches(ends, max(1, piece // 4))


def kmeans(keys: Tensor, first: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Lloyd's rounds by cosine from the tokens `first`; a cluster nobody joins keeps its centre.

    keys [heads, n, dim] -> cluster of each token [heads, n], centres [heads, k, dim] as plain means
    """
    centres, member = keys[:, first].float(), None
    for _ in range(max(1, iterations)):
        closest = assign(keys, centres)
        if member is not None and closest.equal(member):
            break
        member = closest
        if iterations:
            middle, size = means(keys, member, len(first))
            centres = torch.where(size[..., None] > 0, middle, centres)
    return member, centres


def compacted(member: Tensor) -> Tensor:
    """Units renumbered so that those nobody is in vanish, unless another head has them. [heads, n]"""
    used = torch.zeros(int(member.max()) + 1, dtype=torch.long, device=member.device)
    used[member.flatten()] = 1
    return (used.cumsum(0) - 1)[member]


def stretches(ends: Tensor, longest: int) -> Tensor:
    """Number the stretches that end at these tokens, none longer than allowed. ends [n] bool -> [n]"""
    index = torch.arange(len(ends), device=ends.device)
    begins = torch.cat([ends.new_ones(1), ends[:-1]])
    start = torch.where(begins, index, 0).cummax(0).values
    begins = begins | ((index - start) % longest == 0)
    return begins.long().cumsum(0) - 1


def boundaries(surprise: list[float], gamma: float, window: int) -> list[int]:
    """Where events begin: at the first token, and wherever surprise exceeds mean + gamma · std of those before."""
    starts = [0] if surprise else []
    for t in range(1, len(surprise)):
        before = surprise[max(0, t - window) : t]
        mean = sum(before) / len(before)
        spread = (sum((s - mean) ** 2 for s in before) / len(before)) ** 0.5
        if surprise[t] > mean + gamma * spread:
            starts.append(t)
    return starts


def similarity(keys: Tensor) -> Tensor:
    """Dot products of keys, all heads together. [n, n] float64"""
    joined = keys.double().transpose(0, 1).flatten(1)
    return joined @ joined.t()


def refined(starts: list[int], graph: Tensor) -> list[int]:
    """Each boundary moved, left to right, to where the two events beside it are most modular.

    It stays behind the one before; the later of equals wins. Sums over blocks come from running sums of the graph.
    """
    n = len(graph)
    sums = torch.zeros(n + 1, n + 1, dtype=graph.dtype, device=graph.device)
    sums[1:, 1:] = graph.cumsum(0).cumsum(1)
    moved = starts[:1]
    for i in range(1, len(starts)):
        begin, end = moved[-1], starts[i + 1] if i + 1 < len(starts) else n
        cuts = torch.arange(starts[i], begin, -1, device=graph.device)  # the latest first
        moved.append(int(cuts[_modularity(sums, begin, end, cuts).argmax()]))
    return moved


def _modularity(sums: Tensor, begin: int, end: int, cuts: Tensor) -> Tensor:
    """Of the events [begin, cut) and [cut, end) in the graph of [begin, end), for every cut."""

    def block(a: Tensor | int, b: Tensor | int, c: Tensor | int, d: Tensor | int) -> Tensor:
        return sums[b, d] - sums[a, d] - sums[b, c] + sums[a, c]

    total = block(begin, end, begin, end)
    left, right = block(begin, cuts, begin, cuts), block(cuts, end, cuts, end)
    degree_left, degree_right = block(begin, cuts, begin, end), block(cuts, end, begin, end)
    safe = torch.where(total == 0, torch.ones_like(total), total)
    quality = (left + right - (degree_left**2 + degree_right**2) / safe) / (2 * safe)
    return torch.where(total == 0, torch.zeros_like(quality), quality)
