"""Which tokens of a forward pass are real, row by row: padding never enters a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.compress.method import Schedule
from kvkeep.errors import CacheMisuse
from kvkeep.types import Budget


@dataclass(frozen=True)
class BatchLayout:
    """The real tokens of one forward pass, per row: how many, in which columns, and their token positions."""

    counts: list[int]
    token_columns: list[Tensor] | None  # None: no row is padded
    positions: list[Tensor]
    evict_now: list[bool]  # rows to be brought back within their budget after this pass
    seen: list[int]  # tokens of each row before this pass
    frozen: bool = False  # nothing is evicted any more
    expected: int = 0  # tokens of each row before any is evicted
    evict_later: list[bool] | None = None  # rows that are evicted from when their text has been fed again
    guesses: BatchLayout | None = None  # the tokens behind these, in the same pass, that may be taken back
    guessed: bool = False  # these tokens may

    @property
    def is_step(self) -> bool:
        """One token for each row: decoding."""
        return self.token_columns is None and max(self.counts) == 1

    @property
    def to_come(self) -> int:
        """Tokens of a row, these included, before any is evicted."""
        return max(0, self.expected - min(self.seen))

    @property
    def is_deferred(self) -> bool:
        """Nothing is evicted before a later chunk of the prompt."""
        return self.seen[0] + self.counts[0] < self.expected

    @property
    def ends_deferral(self) -> bool:
        """All layers hold a whole prompt, and are evicted from in this pass."""
        return self.seen[0] + self.counts[0] == self.expected

    def unpad(self, tensor: Tensor, row: int) -> Tensor:
        """One row of [rows, heads, q, dim] without its padding: [heads, count, dim]"""
        return tensor[row] if self.token_columns is None else tensor[row][:, self.token_columns[row]]

    def pack(self, queries: Tensor) -> Tensor:
        """Every row's real queries moved to the end, zeros before. [rows, heads, q, dim]"""
        if self.token_columns is None:
            return queries
        packed = torch.zeros_like(queries)
        for row, count in enumerate(self.counts):
            packed[row, :, queries.shape[2] - count :] = self.unpad(queries, row)
        return packed

    def unpack(self, output: Tensor) -> Tensor:
        """Undo `pack`."""
        if self.token_columns is None:
            return output
        unpacked = torch.zeros_like(output)
        for row, (count, columns) in enumerate(zip(self.counts, self.token_columns, strict=True)):
            unpacked[row, :, columns] = output[row, :, output.shape[2] - count :]
        return unpacked

    def to(self, device: torch.device) -> BatchLayout:
        """The same on another layer's device."""
        if self.positions[0].device == device:
            return self
        columns = None if self.token_columns is None else [c.to(device) for c in self.token_columns]
        positions, guesses = [p.to(device) for p in self.positions], self.guesses and self.guesses.to(device)
        return replace(self, token_columns=columns, positions=positions, guesses=guesses)

    def tokens(self, span: slice) -> BatchLayout:
        """Some of the tokens alone, where no row is padded."""
        positions = [p[span] for p in self.positions]
        return replace(self, counts=[len(p) for p in positions], positions=positions)

    def held_whole(self) -> BatchLayout:
        """Evict nothing yet: the prompt is fed again first."""
        if self.frozen or max(self.counts) == 1 and all(self.seen):
            return self
        return replace(self, evict_now=[False] * len(self.counts), evict_later=self.evict_now)

    def as_guesses(self, selects: bool) -> BatchLayout:
        """All of these tokens may be taken back. selects: what is kept of those before them is selected again"""
        return replace(self, evict_now=[selects] * len(self.counts), frozen=True, guessed=True)

    def with_guesses(self, count: int) -> BatchLayout:
        """Followed by so many guesses in every row: nothing is evicted for them."""
        seen = [s + n for s, n in zip(self.seen, self.counts, strict=True)]
        like = self.positions[0]
        positions = [torch.arange(s, s + count, dtype=like.dtype, device=like.device) for s in seen]
        how = [count] * len(seen), None, positions, [False] * len(seen), seen
        return replace(self, guesses=BatchLayout(*how, frozen=True, guessed=True))


class PaddingTracker:
    """Counts every row's tokens over the life of a cache, and says when a row is evicted from."""

    def __init__(self, budget: Budget, whole: int, schedule: Schedule) -> None:
        """whole: a text of so many tokens is kept whole, even where the budget is less"""
        self.budget, self.schedule, self.whole = budget, schedule, whole
        self.seen: list[int] = []  # tokens of each row so far, padding excluded
        self.kept: list[int] = []  # of these, how many the budget leaves to each KV head on average
        self.padded_length = 0  # tokens of each row so far, padding included
        self.attention_mask: Tensor | None = None  # [rows, padded_length] the last one, if any
        self.prompt: list[int] = []  # of each row's tokens, how many are not of the last generation
        self.context = 0  # of these, how many came before the question
        self.frozen = False  # nothing is evicted any more
        self.deferred_until = 0  # tokens of each row: while they are fewer, nothing is evicted

    def next_layout(self, rows: int, q: int, padding: Tensor | None, device: torch.device) -> BatchLayout:
        if self.seen and len(self.seen) != rows:
            raise CacheMisuse(f"this cache holds {len(self.seen)} rows, but {rows} came; a cache serves one batch.")
        self.seen, self.kept = self.seen or [0] * rows, self.kept or [0] * rows
        self.prompt = self.prompt or [0] * rows
        columns = self._token_columns(None if padding is None else padding.to(device), q)
        counts = [q] * rows if columns is None else [len(c) for c in columns]
        positions = [
            torch.arange(s, s + n, dtype=torch.int32, device=device) for s, n in zip(self.seen, counts, strict=True)
        ]
        evict_now = [self._should_evict(row, count) for row, count in enumerate(counts)]
        return BatchLayout(counts, columns, positions, evict_now, self.seen, self.frozen, self.deferred_until)

    def _should_evict(self, row: int, count: int) -> bool:
        """After a prefill always, after a decode step when the schedule says so."""
        if count == 1 and self.seen[row]:
            return self.is_due(row, 1)
        return count > 0 and not self._keeps_all(self.seen[row] + count)

    def _keeps_all(self, seen: int) -> bool:
        """Whether nothing is evicted from a row of so many tokens."""
        return self.frozen or seen < self.deferred_until or seen <= self.whole

    def is_due(self, row: int, count: int) -> bool:
        """Whether a row is evicted from when the last of `count` more tokens is decoded."""
        seen, kept = self.seen[row] + count, self.kept[row] + count
        return not self._keeps_all(seen) and self.schedule.evict_now(kept, self.budget.tokens(seen))

    def _token_columns(self, padding: Tensor | None, q: int) -> list[Tensor] | None:
        if padding is None:
            return None
        if padding.shape[1] != self.padded_length + q:
            raise CacheMisuse(
                f"attention_mask covers {padding.shape[1]} tokens, but {self.padded_length} were seen and {q} are new; "
                f"pass a mask of {self.padded_length + q} columns, past ones included."
            )
        before = None if self.attention_mask is None else self.attention_mask.to(padding.device)
        if before is not None and bool((before & ~padding[:, : before.shape[1]]).any()):
            raise CacheMisuse(
                "attention_mask hides tokens it showed before; a cache cannot remove them: make a new one."
            )
        new = padding[:, -q:]
        return None if bool(new.all()) else [row.nonzero().squeeze(1) for row in new]

    def commit(self, layout: BatchLayout, q: int, padding: Tensor | None) -> None:
        """Count the tokens of a completed forward pass. Single ones that follow others were generated."""
        before = zip(self.seen, self.prompt, layout.counts, strict=True)
        self.prompt = [s + n if n > 1 or not s else prompt for s, prompt, n in before]
        self.seen = [s + n for s, n in zip(self.seen, layout.counts, strict=True)]
        self.kept = [k + n for k, n in zip(self.kept, layout.counts, strict=True)]
        self.count_evicted(layout.evict_now)
        self.padded_length += q
        self.attention_mask = padding if padding is not None else self.attention_mask

    def count_evicted(self, rows: Sequence[bool]) -> None:
        """Some rows were evicted from down to their budget."""
        each = zip(self.kept, self.seen, rows, strict=True)
        self.kept = [min(kept, self.budget.tokens(seen)) if evicted else kept for kept, seen, evicted in each]

    def append_decoded(self, count: int) -> None:
        """Count tokens that were decoded elsewhere, where nothing was evicted for them, or one for each new one."""
        self.seen, self.kept = [s + count for s in self.seen], [k + count for k in self.kept]
        self.padded_length += count
        if self.schedule.every == 1 and not self.frozen:
            self.count_evicted([True] * len(self.seen))

    def mark_prompt(self) -> None:
        """All tokens so far are the prompt, a last chunk of a single token included."""
        self.prompt = list(self.seen)

    def mark_context(self) -> None:
        """All tokens so far are the context; nothing is evicted for the question and answer that follow."""
        self.mark_prompt()
        self.context, self.frozen = self.padded_length, True

    @property
    def parts(self) -> dict[str, list[int]]:
        """Each row's tokens up to the end of each part, in order."""
        if not self.context:
            return {"prompt": self.prompt, "generated": self.seen}
        return {"context": [self.context] * len(self.seen), "question": self.prompt, "generated": self.seen}

    @property
    def has_parts(self) -> bool:
        """There are tokens beyond the first part."""
        first = next(iter(self.parts.values()))
        return first != self.seen

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.prompt = [self.prompt[row] for row in rows]
        self.seen, self.kept = [self.seen[row] for row in rows], [self.kept[row] for row in rows]
        self.attention_mask = None if self.attention_mask is None else self.attention_mask[list(rows)]
