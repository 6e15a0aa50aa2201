"""Chunking: which tokens are offloaded, and retrieved, as one unit.

`num_ready`: how many of the tokens beyond the near window (oldest first) can be offloaded now; marks are empty unless
`RetrievalConfig.needs` some. `members`: the unit of each of them. `uniform_size`: the size of all units, 1 if they
differ. `contiguous`: units are spans of the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.arguments import Checked, Positive
from kvkeep.compress.protocols import Clustering
from kvkeep.kernels.dispatch import assign, means
from kvkeep.types import Observation


@dataclass(frozen=True)
class Chunks(Checked):
    """Spans of text of one length."""

    chunk: Positive | None = None
    default: Positive = 32  # where chunk is not given; at most an 8th of the budget
    contiguous = uniform = True  # uniform: all units are of one size

    def size(self, budget: int) -> int:
        return self.chunk or max(1, min(self.default, budget // 8))

    uniform_size = size

    def num_ready(self, marks: Tensor, waiting: int, budget: int) -> int:
        return waiting // self.size(budget) * self.size(budget)

    def members(self, keys: Tensor, marks: Tensor, budget: int) -> Tensor:
        """[1, n] unit of each token"""
        return (torch.arange(keys.shape[1], device=keys.device) // self.size(budget))[None]


@dataclass(frozen=True)
class Clusters(Checked):
    """Similar keys of any position: k-means by cosine, one clustering per KV head. Deterministic.

    The first centres are tokens at equal distances in the text.
    """

    tokens: Positive = 80  # per cluster, on average
    pack: Positive | None = None  # decoded tokens that are clustered together
    iterations: Positive = 20
    default: Positive = 320
    contiguous = uniform = False

    def size(self, budget: int) -> int:
        return self.pack or max(1, min(self.default, budget // 4))

    num_ready = Chunks.num_ready

    def uniform_size(self, budget: int) -> int:
        return 1

    def members(self, keys: Tensor, marks: Tensor, budget: int) -> Tensor:
        """[kv_heads, n] cluster of each token"""
        n = keys.shape[1]
        count = max(1, n // self.tokens)
        first = torch.arange(count, device=keys.device) * n // count
        return kmeans(keys, first, self.iterations)[0]


@dataclass(frozen=True)
class MethodClusters(Checked):
    """The clusters of a method that evicts whole clusters."""

    group: Clustering
    pack: Positive | None = None
    default: Positive = 128
    contiguous = uniform = False

    size, num_ready, uniform_size = Clusters.size, Chunks.num_ready, Clusters.uniform_size

    def members(self, keys: Tensor, marks: Tensor, budget: int) -> Tensor:
        heads, n, dim = keys.shape
        where = torch.arange(n, device=keys.device).expand(heads, -1)
        seen = Observation(keys[:, :0], keys, keys, where, (n,) * heads, n, n, dim**-0.5)
        return renumber_units(self.group.members(seen))


@dataclass(frozen=True)
class SentenceChunks(Checked):
    """Spans that end at a mark: sentences. Too long a span is split."""

    longest: Positive = 128
    contiguous, uniform = True, False
    uniform_size = Clusters.uniform_size

    def size(self, budget: int) -> int:
        return max(1, min(self.longest, budget // 8))

    def num_ready(self, marks: Tensor, waiting: int, budget: int) -> int:
        """Everything up to the last mark, and behind it whole spans of the longest length."""
        ends = (marks[:waiting] > 0).nonzero()
        last = int(ends[-1]) + 1 if len(ends) else 0
        longest = self.size(budget)
        return last + (waiting - last) // longest * longest

    def members(self, keys: Tensor, marks: Tensor, budget: int) -> Tensor:
        return split_spans(marks > 0, self.size(budget))[None]


@dataclass(frozen=True)
class Events(Checked):
    """EM-LLM: a new event begins at a surprising token, moved to where the keys on both sides differ most.

    A token's surprise is compared with those before it in its segment of the text.
    """

    gamma: float = 1.0
    longest: Positive = 128
    shortest: Positive = 8
    refine: bool = True
    contiguous, uniform = True, False

    def size(self, budget: int) -> int:
        """Text is split into events in segments of this size; an event ends with its segment at the latest."""
        return max(1, min(4 * self.longest, budget // 4))

    num_ready, uniform_size = Chunks.num_ready, Clusters.uniform_size

    def members(self, keys: Tensor, marks: Tensor, budget: int) -> Tensor:
        size = self.size(budget)
        numbers, before = [], 0
        for first in range(0, keys.shape[1], size):
            segment = slice(first, first + size)
            numbers.append(before + self._events(keys[:, segment], marks[segment].tolist(), size))
            before = int(numbers[-1][-1]) + 1
        return torch.cat(numbers)[None]

    def _events(self, keys: Tensor, surprise: list[float], size: int) -> Tensor:
        """Numbers of the events in one segment. [n]"""
        starts = boundaries(surprise, self.gamma, size)
        if self.refine:
            starts = refine_boundaries(starts, similarity(keys))
        kept = [0]
        for start in starts[1:]:
            if start - kept[-1] >= self.shortest:
                kept.append(start)
        ends = torch.zeros(keys.shape[1], dtype=torch.bool, device=keys.device)
        ends[torch.tensor([start - 1 for start in kept[1:]], dtype=torch.long, device=keys.device)] = True
        return split_spans(ends, max(1, size // 4))


def kmeans(keys: Tensor, first: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm by cosine from the tokens `first`; an empty cluster keeps its centre.

    keys [heads, n, dim] -> cluster of each token [heads, n], centres [heads, k, dim] as plain means
    """
    centres = keys[:, first].float()
    member = assign(keys, centres)
    for number in range(iterations):
        closest = assign(keys, centres) if number else member
        if number and closest.equal(member):
            break
        middle, size = means(keys, closest, len(first))
        member, centres = closest, torch.where(size[..., None] > 0, middle, centres)
    return member, centres


def renumber_units(member: Tensor) -> Tensor:
    """Units renumbered without those that are empty in all heads. [heads, n]"""
    used = torch.zeros(int(member.max()) + 1, dtype=torch.long, device=member.device)
    used[member.flatten()] = 1
    return (used.cumsum(0) - 1)[member]


def split_spans(ends: Tensor, longest: int) -> Tensor:
    """Number the spans that end at these tokens, splitting those longer than `longest`. ends [n] bool -> [n]"""
    index = torch.arange(len(ends), device=ends.device)
    begins = torch.cat([ends.new_ones(1), ends[:-1]])
    start = torch.where(begins, index, 0).cummax(0).values
    begins = begins | ((index - start) % longest == 0)
    return begins.long().cumsum(0) - 1


def boundaries(surprise: list[float], gamma: float, window: int) -> list[int]:
    """Starts of events: the first token, and each whose surprise exceeds mean + gamma · std of those before."""
    starts = [0] if surprise else []
    for t in range(1, len(surprise)):
        before = surprise[max(0, t - window) : t]
        mean = sum(before) / len(before)
        spread = (sum((s - mean) ** 2 for s in before) / len(before)) ** 0.5
        if surprise[t] > mean + gamma * spread:
            starts.append(t)
    return starts


def similarity(keys: Tensor) -> Tensor:
    """Dot products of keys, heads concatenated. [n, n] float64"""
    vectors = keys.double().transpose(0, 1).flatten(1)
    return vectors @ vectors.t()


def refine_boundaries(starts: list[int], graph: Tensor) -> list[int]:
    """Each boundary moved, left to right, to where the modularity of the two events beside it is highest.

    It stays behind the one before; the later of equals wins. Sums over blocks come from cumulative sums of the graph.
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
    """Modularity of the events [begin, cut) and [cut, end) in the graph of [begin, end), for every cut."""

    def block(a: Tensor | int, b: Tensor | int, c: Tensor | int, d: Tensor | int) -> Tensor:
        return sums[b, d] - sums[a, d] - sums[b, c] + sums[a, c]

    total = block(begin, end, begin, end)
    left, right = block(begin, cuts, begin, cuts), block(cuts, end, cuts, end)
    degree_left, degree_right = block(begin, cuts, begin, end), block(cuts, end, begin, end)
    safe = torch.where(total == 0, torch.ones_like(total), total)
    quality = (left + right - (degree_left**2 + degree_right**2) / safe) / (2 * safe)
    return torch.where(total == 0, torch.zeros_like(quality), quality)
