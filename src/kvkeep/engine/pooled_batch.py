"""Several compressed caches of one text, decoded as one batch.

Nothing is evicted here: a question and its answer are appended to copies of the caches, which stay as they are, so one
compressed text serves many questions. Rows are padded on CPU; a GPU has kernels for ragged ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.engine.cuda_graph import MAX_WARMUP_PASSES, CudaGraphRunner
from kvkeep.errors import CacheMisuse
from kvkeep.kernels.dispatch import append_ragged, padded_attention, ragged_attention
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import CompressedLayer, HFCacheAdapter, execution_device
from kvkeep.types import Tokens

CAPTURE_AFTER = 8  # decode steps before one is captured: a capture costs more than a short answer


@dataclass
class PaddedRows:
    """One layer's rows. keys and values [rows, kv_heads, size, dim], of which each head's first `lengths` are used"""

    keys: Tensor
    values: Tensor
    lengths: Tensor  # [rows, kv_heads]

    @classmethod
    def of(cls, rows: Sequence[Sequence[Tokens]], room: int) -> PaddedRows:
        """Copies of every row's key heads, padded to the longest and `room` more tokens."""
        lengths, like = _lengths(rows), rows[0][0]
        shape = *lengths.shape, int(lengths.max()) + room
        keys, values = (like.keys.new_zeros(*shape, t.shape[-1]) for t in (like.keys, like.values))
        for row, heads in enumerate(rows):
            for number, head in enumerate(heads):
                mine = row, number, slice(len(head.keys))
                keys[mine], values[mine] = head.keys, head.values
        return cls(keys, values, lengths.to(keys.device))

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append q tokens to every head. keys, values [rows, kv_heads, q, dim]"""
        where = (self.lengths[..., None] + torch.arange(keys.shape[2], device=keys.device))[..., None]
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer.scatter_(2, where.expand(-1, -1, -1, buffer.shape[-1]), new.to(buffer.dtype))
        self.lengths += keys.shape[2]

    def attend(self, call: AttentionCall) -> Tensor:
        how = call.scale, call.softcap, call.sink_logits
        return padded_attention(call.query, self.keys, self.values, self.lengths, *how)

    def select_rows(self, rows: Tensor) -> PaddedRows:
        return PaddedRows(self.keys[rows], self.values[rows], self.lengths[rows])


@dataclass
class RaggedRows:
    """The same without padding: every head has a span of a flat buffer. keys and values [slots, dim]"""

    keys: Tensor
    values: Tensor
    starts: Tensor  # [rows, kv_heads]
    lengths: Tensor  # [rows, kv_heads]
    longest: int  # tokens a head may have

    @classmethod
    def of(cls, rows: Sequence[Sequence[Tokens]], room: int) -> RaggedRows:
        lengths, like = _lengths(rows), rows[0][0]
        *starts, total = accumulate((lengths + room).flatten().tolist(), initial=0)
        keys, values = (like.keys.new_zeros(total, t.shape[-1]) for t in (like.keys, like.values))
        for start, head in zip(starts, (head for heads in rows for head in heads), strict=True):
            mine = slice(start, start + len(head.keys))
            keys[mine], values[mine] = head.keys, head.values
        spans = (torch.tensor(starts).view_as(lengths), lengths)
        return cls(keys, values, *(t.to(keys.device) for t in spans), int(lengths.max()) + room)

    def append(self, keys: Tensor, values: Tensor) -> None:
        active = torch.ones_like(self.lengths[:, :1])
        for token in range(keys.shape[2]):
            new = (t[:, :, token : token + 1] for t in (keys, values))
            append_ragged(self.keys, self.values, *new, self.starts, self.lengths, active)

    def attend(self, call: AttentionCall) -> Tensor:
        how = self.longest, call.scale, call.softcap, call.sink_logits
        return ragged_attention(call.query, self.keys, self.values, self.starts, self.lengths, *how)

    def select_rows(self, rows: Tensor) -> RaggedRows:
        return replace(self, starts=self.starts[rows], lengths=self.lengths[rows])


def _lengths(rows: Sequence[Sequence[Tokens]]) -> Tensor:
    return torch.tensor([[len(head.keys) for head in heads] for heads in rows])


class PooledBatch(HFCacheAdapter):
    """A cache of many rows, each a copy of another cache of the same text."""

    def __init__(self, model: Any, caches: Sequence[Cache], room: int):
        """room: tokens that may be appended to each row"""
        super().__init__(model)
        if len({cache.seen for cache in caches}) != 1 or any(len(cache.tracker.seen) != 1 for cache in caches):
            raise CacheMisuse("only caches of one row and the same number of tokens can be decoded together.")
        self.length = caches[0].seen
        self.max_length = self.length + room
        room += MAX_WARMUP_PASSES
        kind = RaggedRows if is_ragged(model) else PaddedRows
        stores = [cache.backend.store for cache in caches]
        self.rows = {i: kind.of([store[i].row(0) for store in stores], room) for i in self.compressed_layers}
        self.copy_hf_layers(caches[0])
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer):
                layer.batch_repeat_interleave(len(caches))
        self._init_step(len(caches))

    def _init_step(self, rows: int) -> None:
        """Allocate the inputs of a decode step, where a CUDA graph reads them."""
        self.tokens, self.position_ids = torch.zeros(2, rows, 1, dtype=torch.int64, device=execution_device(self.model))
        self.steps, self.runner = 0, None

    @property
    def seen(self) -> int:
        return self.length

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        rows = self.rows[index]
        rows.append(call.key.detach(), call.value.detach())
        return call.to_hf_output(rows.attend(call))

    def extend(self, ids: Tensor, keep: int = 1) -> Tensor:
        """One forward pass. ids [rows, q] -> logits of the last `keep` tokens, 0: of all [rows, keep, vocabulary]"""
        if self.length + ids.shape[1] > self.max_length:
            room = self.max_length - self.length
            raise CacheMisuse(f"{ids.shape[1]} tokens were to be appended, but there is room for {room}.")
        with torch.inference_mode():
            if ids.shape[1] == 1 and len(self.compressed_layers) == len(self.layers):
                logits = self._decode(ids)
            else:
                ids = ids.to(execution_device(self.model))
                logits = self.model(ids, past_key_values=self, logits_to_keep=keep).logits
        self.length += ids.shape[1]
        return logits

    def _decode(self, ids: Tensor) -> Tensor:
        """The same for one token each, captured after `CAPTURE_AFTER` steps. -> valid until the next forward pass"""
        self.tokens.copy_(ids)
        self.position_ids.fill_(self.length)
        self.steps += 1
        if self.steps == CAPTURE_AFTER:
            lengths = {index: rows.lengths.clone() for index, rows in self.rows.items()}
            step = WeakMethod(self._step)  # weak: an unreferenced batch is freed at once
            self.runner = CudaGraphRunner(lambda: step()(), self.model)
            for index, before in lengths.items():
                self.rows[index].lengths.copy_(before)
        return self.runner() if self.runner else self._step()

    def _step(self) -> Tensor:
        return self.model(self.tokens, position_ids=self.position_ids, past_key_values=self).logits

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows only."""
        index = torch.tensor(rows)
        self.rows = {i: layer.select_rows(index.to(layer.keys.device)) for i, layer in self.rows.items()}
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer):
                layer.batch_select_indices(index)
        self._init_step(len(rows))


def is_ragged(model: Any) -> bool:
    """Whether rows of different lengths cost no padding."""
    return model.device.type == "cuda"


def bin_pack(sizes: Sequence[int], max_slots: int, ragged: bool) -> list[list[int]]:
    """Rows to be decoded as one batch of at most `max_slots`; if not ragged, at most half of these are padding.

    -> their indices, largest first
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        last = batches[-1] if batches else []
        used = sum(sizes[other] for other in [*last, row])
        slots = used if ragged or not last else (len(last) + 1) * sizes[last[0]]
        if last and slots <= min(2 * used, max_slots):
            last.append(row)
        else:
            batches.append([row])
    return batches
