"""The words every part of the library speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NOWHERE = 2**31 - 1  # position of padding where key heads hold different numbers of tokens: later than any query


@dataclass(frozen=True)
class Tokens:
    """Keys and values with what is known of each: [n, …] for one key head, [kv_heads, n, …] for several."""

    keys: Tensor
    values: Tensor
    positions: Tensor  # where each token stood in the text
    places: Tensor | None = None  # where its key was made to stand, if a method moves keys
    notes: Tensor | None = None  # [.., n, k] what a method remembers of it, if it does

    def map(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """The same change to every tensor."""
        return Tokens(*(None if t is None else change(t) for t in self.parts))

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        return self.keys, self.values, self.positions, self.places, self.notes


@dataclass(frozen=True)
class Observation:
    """What one layer of one sequence saw: the newest queries, and every key they may vote for. Read-only.

    Queries sit at positions `cursor - w … cursor - 1`. Tokens of a key head are in ascending order of position;
    a head with fewer tokens than the longest is padded at the end with position NOWHERE.
    """

    queries: Tensor  # [heads, w, dim] as attention used them: after RoPE and any norm
    keys: Tensor  # [kv_heads, n, dim]
    values: Tensor  # [kv_heads, n, dim]
    positions: Tensor  # [kv_heads, n] where each token stood in the text
    lengths: tuple[int, ...]  # tokens per key head, padding excluded
    cursor: int  # tokens of text seen so far
    new: int  # how many of them came with this forward pass
    scale: float  # the model's own
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads] extra logit of gpt-oss-like attention
    notes: Tensor | None = None  # [kv_heads, n, k] what the method remembers of each token
    layer: int = 0
    layers: int = 1
    sums: Tensor | None = None  # [heads, w] log-sum-exp of each query's logits, where attention left it
    known: dict[Any, Tensor] | None = None  # what others found out about the same queries and keys, for each other

    def once(self, what: Any, find: Callable[[], Tensor]) -> Tensor:
        """Found out by whoever comes first; nobody changes it."""
        if self.known is None or what is None:
            return find()
        if what not in self.known:
            self.known[what] = find()
        return self.known[what]

    @property
    def is_step(self) -> bool:
        """A single token came on top of others: decoding."""
        return self.new == 1 < self.cursor

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of the fullest key head."""
        return self.keys.shape[1]


@dataclass(frozen=True)
class Step:
    """One decode step, all rows at once (a row of another layer is just another row).

    Every key head holds the same n tokens, the new one included, in no order.
    """

    positions: Tensor  # [rows, kv_heads, n] where each token stood in the text
    notes: Tensor | None  # [rows, kv_heads, n, k] what the method remembers of each
    newest: Tensor  # [rows, kv_heads] which of the n is the new one
    logits: Tensor | None  # [rows, kv_heads, group, n] float32, as the model's softmax got them; None if nobody asked
    chances: Tensor | None  # what that softmax made of them
    value: Tensor  # [rows, kv_heads, dim] of the new token
    lengths: list[int]  # tokens of text each row has seen so far
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [rows, kv_heads, group] extra logit of gpt-oss-like attention

    def per_row(self, numbers: list) -> Tensor | float:
        """One number per row, in a shape that fits [rows, kv_heads, n]; a plain number where all are the same."""
        if len(set(numbers)) == 1:
            return numbers[0]
        return torch.tensor(numbers, device=self.newest.device)[:, None, None]


@dataclass(frozen=True)
class Selection:
    """What one layer of one sequence keeps. The only message from the part that decides to the part that acts."""

    index: Tensor  # [kv_heads, longest] token indices, ascending; what lies beyond a head's length is padding
    lengths: tuple[int, ...]  # how many of them are real, per key head

    def tolist(self) -> list[list[int]]:
        """Per key head, the kept token indices in ascending order."""
        return [row[:length] for row, length in zip(self.index.tolist(), self.lengths, strict=True)]
