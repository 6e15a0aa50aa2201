"""Which of the tokens in a forward pass are real, row by row: padding never enters a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.compress.schedule import Schedule
from kvkeep.errors import CacheMisuse


@dataclass(frozen=True)
class Arrival:
    """The real tokens of one forward pass, per row: how many, in which columns, and where in the row's text."""

    counts: list[int]
    columns: list[Tensor] | None  # None: every column of every row is real
    positions: list[Tensor]
    due: list[bool]  # whose tokens compete after this pass

    @property
    def is_step(self) -> bool:
        """One token for each row: decoding."""
        return self.columns is None and max(self.counts) == 1

    def real(self, tensor: Tensor, row: int) -> Tensor:
        """One row of [rows, heads, q, dim] without its padding: [heads, count, dim]"""
        return tensor[row] if self.columns is None else tensor[row][:, self.columns[row]]

    def pack(self, queries: Tensor) -> Tensor:
        """Every row's real queries moved to the end, zeros before. [rows, heads, q, dim]"""
        if self.columns is None:
            return queries
        packed = torch.zeros_like(queries)
        for row, count in enumerate(self.counts):
            packed[row, :, queries.shape[2] - count :] = self.real(queries, row)
        return packed

    def unpack(self, output: Tensor) -> Tensor:
        """Undo `pack`."""
        if self.columns is None:
            return output
        spread = torch.zeros_like(output)
        for row, (count, columns) in enumerate(zip(self.counts, self.columns, strict=True)):
            spread[row, :, columns] = output[row, :, output.shape[2] - count :]
        return spread

    def to(self, device: torch.device) -> Arrival:
        """The same, on the device of another layer."""
        if self.positions[0].device == device:
            return self
        columns = None if self.columns is None else [c.to(device) for c in self.columns]
        return Arrival(self.counts, columns, [p.to(device) for p in self.positions], self.due)


class Arrivals:
    """Counts every row's tokens over the life of a cache, and says when they have to compete."""

    def __init__(self, tokens: Callable[[int], int], schedule: Schedule) -> None:
        self.tokens = tokens  # the budget of a row that has seen so many tokens
        self.schedule = schedule
        self.seen: list[int] = []  # tokens of each row so far, padding excluded
        self.held: list[int] = []  # of these, how many the budget leaves to each key head on average
        self.columns = 0  # tokens of each row so far, padding included
        self.shown: Tensor | None = None  # [rows, columns] the last padding mask, if any
        self.prompt: list[int] = []  # of each row's tokens, how many came before those generated last
        self.context = 0  # of these, how many were there before the question
        self.closed = False  # what comes from now on is held and competes with nothing

    def next(self, rows: int, q: int, padding: Tensor | None, device: torch.device) -> Arrival:
        if self.seen and len(self.seen) != rows:
            raise CacheMisuse(f"this cache holds {len(self.seen)} rows, but {rows} came; a cache serves one batch.")
        self.seen, self.held = self.seen or [0] * rows, self.held or [0] * rows
        self.prompt = self.prompt or [0] * rows
        columns = self._real_columns(None if padding is None else padding.to(device), q)
        counts = [q] * rows if columns is None else [len(c) for c in columns]
        positions = [
            torch.arange(s, s + n, dtype=torch.int32, device=device) for s, n in zip(self.seen, counts, strict=True)
        ]
        due = [self._due(row, count) for row, count in enumerate(counts)]
        return Arrival(counts, columns, positions, due)

    def _due(self, row: int, count: int) -> bool:
        """A prompt always competes, a single token when the schedule says so."""
        if self.closed:
            return False
        if count == 1 and self.seen[row]:
            return self.schedule.due(self.held[row] + 1, self.tokens(self.seen[row] + 1))
        return count > 0

    def _real_columns(self, padding: Tensor | None, q: int) -> list[Tensor] | None:
        if padding is None:
            return None
        if padding.shape[1] != self.columns + q:
            raise CacheMisuse(
                f"attention_mask covers {padding.shape[1]} tokens, but {self.columns} were seen and {q} are new; "
                f"pass a mask of {self.columns + q} columns, past ones included."
            )
        shown = None if self.shown is None else self.shown.to(padding.device)
        if shown is not None and bool((shown & ~padding[:, : shown.shape[1]]).any()):
            raise CacheMisuse(
                "attention_mask hides tokens it showed before; a cache cannot unread them: make a new one."
            )
        fresh = padding[:, -q:]
        return None if bool(fresh.all()) else [row.nonzero().squeeze(1) for row in fresh]

    def settle(self, arrival: Arrival, q: int, padding: Tensor | None) -> None:
        """The forward pass went through: its tokens count. Single ones that follow others were generated."""
        before = zip(self.seen, self.prompt, arrival.counts, strict=True)
        self.prompt = [s + n if n > 1 or not s else prompt for s, prompt, n in before]
        self.seen = [s + n for s, n in zip(self.seen, arrival.counts, strict=True)]
        grown = [h + n for h, n in zip(self.held, arrival.counts, strict=True)]
        limits = [self.tokens(s) if due else h for s, h, due in zip(self.seen, grown, arrival.due, strict=True)]
        self.held = [min(h, limit) for h, limit in zip(grown, limits, strict=True)]
        self.columns += q
        self.shown = padding if padding is not None else self.shown

    def mark_prompt(self) -> None:
        """What came so far is the prompt, a last piece of a single token included."""
        self.prompt = list(self.seen)

    def mark_context(self) -> None:
        """What came so far is a text; a question about it and an answer follow, and compete with nothing."""
        self.mark_prompt()
        self.context, self.closed = self.columns, True

    @property
    def parts(self) -> dict[str, list[int]]:
        """Each row's tokens up to the end of each part, in order."""
        if not self.context:
            return {"prompt": self.prompt, "generated": self.seen}
        return {"context": [self.context] * len(self.seen), "question": self.prompt, "generated": self.seen}

    @property
    def has_parts(self) -> bool:
        """More than the first part has come."""
        first = next(iter(self.parts.values()))
        return first != self.seen

    def take(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.prompt = [self.prompt[row] for row in rows]
        self.seen, self.held = [self.seen[row] for row in rows], [self.held[row] for row in rows]
        self.shown = None if self.shown is None else self.shown[list(rows)]
