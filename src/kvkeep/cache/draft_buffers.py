"""What drafts are decoded from: the kept tokens of one layer, of several rows, and the queries of all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.replay import RowText
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.storage.pool import RaggedBuffer
from kvkeep.storage.ragged import LayerKind, RaggedLayer


@dataclass(frozen=True)
class Kept:
    """What is kept of some rows of a cache for their drafts: with the text's last token, which is fed again."""

    store: dict[int, RaggedLayer]
    rows: dict[int, RowText]

    def segments(self, index: int) -> tuple[list[int], list[int]]:
        """First slot and length of every row and KV head, without the last token."""
        layer = self.store[index]
        mine = [row * layer.kv_heads + head for row in self.rows for head in range(layer.kv_heads)]
        return [layer.starts[each] for each in mine], [layer.lengths[each] - 1 for each in mine]

    def spans(self, index: int) -> list[int]:
        """The same: all first slots, then all ends."""
        first, lengths = self.segments(index)
        return [*first, *(start + length for start, length in zip(first, lengths, strict=True))]


@dataclass(frozen=True)
class DraftSize:
    """What buffers have room for."""

    rows: int = 0
    slots: int = 0  # of a layer, over all rows and KV heads
    longest: int = 0  # tokens of one KV head
    steps: int = 0

    @classmethod
    def of(cls, texts: Sequence[Kept], steps: int) -> DraftSize:
        layers = [[n + steps for text in texts for n in text.segments(i)[1]] for i in texts[0].store]
        longest = 1 << (max(max(each) for each in layers) - 1).bit_length()
        return cls(sum(len(text.rows) for text in texts), max(map(sum, layers)), longest, steps)

    def __or__(self, other: DraftSize) -> DraftSize:
        """Room for either."""
        return DraftSize(*map(max, vars(self).values(), vars(other).values()))


class LayerBuffer(RaggedBuffer):
    """One layer, where each row and KV head has its tokens, and the queries of all steps."""

    def __init__(self, kind: LayerKind, size: DraftSize, table: Tensor, active: Tensor) -> None:
        """table: [2 * rows * kv_heads] starts and lengths; active [rows, 1]"""
        super().__init__(size.slots, kind.key_dim, kind.dtype, kind.device, kind.value_dim)
        self.kind, self.size, self.active = kind, size, active
        self.starts, self.lengths = table.view(2, size.rows, kind.kv_heads)
        self.queries = torch.empty(0)  # [steps, rows, heads, dim] made in the first step, which tells their shape

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.queries.nbytes

    def decode(self, call: AttentionCall, step: Tensor) -> Tensor:
        """Append the new token of the first rows, and write their queries. step [1]"""
        rows, _, _, dim = call.query.shape
        if not len(self.queries):
            self.queries = call.query.new_zeros(self.size.steps, self.size.rows, call.query.shape[1], dim)
        self.queries[:, :rows].index_copy_(0, step.to(call.query.device), call.query[None, :, :, 0])
        where = self.starts[:rows], self.lengths[:rows]
        self.append(call.key, call.value, *where, self.active[:rows])
        output = self.attend(call.query.to(self.kind.dtype), *where, self.size.longest, *call.how)
        return output.to(call.query.dtype)
