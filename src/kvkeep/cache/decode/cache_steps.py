"""The tokens of a cache, while its decode steps evict one token of every KV head for each new one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvkeep.cache.decode.evict_one import EvictOne
from kvkeep.cache.padding import BatchLayout
from kvkeep.compress.step_rule import StepRule
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.storage.ragged import RaggedLayer


@dataclass
class CacheSteps:
    """Tokens move from a cache's layers to rows of `EvictOne` with the first step, and back when somebody wants them.

    Where the rule evicts nothing in steps, they keep token state up to date, and no more.
    """

    store: dict[int, RaggedLayer]  # empty, while there are rows
    rule: StepRule
    rotations: Mapping[int, Rotation | None]

    def __post_init__(self) -> None:
        self.rows: EvictOne | None = None
        self._held: list[int] = []  # tokens of each row's KV heads when they came, and all since
        self.under_way = False  # a forward pass that is such a step

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.store.values()) + (self.rows.nbytes if self.rows else 0)

    def is_possible(self) -> bool:
        """Whether each row has as many tokens in every layer and KV head, and no more than the rule leaves."""
        rule, layers = self.rule, list(self.store.values())
        if self.rows:
            return True
        if not (rule.evicts or rule.memory and not rule.method.placement):
            return False
        rows = [{n for layer in layers for n in layer.row_lengths(row)} for row in range(layers[0].rows)]
        most = rule.tokens if rule.evicts else sys.maxsize
        return all(len(held) == 1 and rule.moved_sinks <= min(held) <= most for held in rows)

    def enter(self, seen: Sequence[int], heads: int) -> EvictOne:
        """Move all tokens to rows of their own. seen: tokens of each row; heads: of queries"""
        if self.rows and not self.rows.is_writable:
            self.leave()
        if self.rows is None:
            self._held, kinds = self.held, {i: layer.kind for i, layer in self.store.items()}
            rows = EvictOne(self.rule, kinds, heads, self.rotations, len(seen), max(self._held) + 1)
            for row, length in enumerate(seen):
                rows.put(row, self.store, length, row)
            self.rows = rows
            for layer in self.store.values():
                layer.clear()
        return self.rows

    @property
    def held(self) -> list[int]:
        """Tokens of each row's KV heads; of full rows that evict, those they would hold if they did not."""
        layer = next(iter(self.store.values()))
        return self._held if self.rows else layer.lengths[:: layer.kv_heads or 1]

    def leave(self) -> None:
        """Move them back."""
        if self.rows is None:
            return
        self.rows.fill(self.store, dict(enumerate(self._held)))
        self.rows = None

    def count(self, steps: int) -> None:
        """Count tokens that every row was given."""
        self._held = [held + steps for held in self._held]

    # a forward pass

    def begin(self, layout: BatchLayout) -> None:
        self.under_way = self._is_step(layout)
        if self.rows:
            self.rows.begin()

    def _is_step(self, layout: BatchLayout) -> bool:
        """Whether every row gets one token, and those that are full, and no others, give one up for it."""
        if not layout.is_step or not min(layout.seen) or layout.frozen or layout.guesses or not self.is_possible():
            return False
        return [self.rule.evicts and n >= self.rule.tokens for n in self.held] == layout.evict_now

    def attend(self, index: int, call: AttentionCall, layout: BatchLayout) -> tuple[Tensor, Tensor | None]:
        if index == next(iter(self.store)):
            self.enter(layout.seen, call.query.shape[1]).reserve(max(self.held) + 1)
        assert self.rows is not None
        return self.rows.attend(index, call)

    def commit(self) -> None:
        self.count(int(self.under_way))
        self.under_way = False

    def rollback(self) -> None:
        if self.under_way and self.rows:
            self.rows.rollback()
        self.under_way = False
