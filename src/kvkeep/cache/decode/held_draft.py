"""Decode steps of drafts that read the texts where these are held: beside them are the draft's own tokens alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.decode.draft_pool import DraftText
from kvkeep.kernels.torch.reference import uniform_stride
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter
from kvkeep.types import Tokens

HeldHeads = tuple[slice, Tensor, Tensor]  # KV heads, and their tokens' keys and values [heads, n, dim]


@dataclass
class OwnTokens:
    """One layer's tokens of a draft, and their queries."""

    keys: Tensor  # [rows, kv_heads, steps, dim]
    values: Tensor
    queries: Tensor  # [steps, rows, heads, dim]
    count: int = 0  # steps so far

    @classmethod
    def like(cls, call: AttentionCall, steps: int, dtype: torch.dtype) -> OwnTokens:
        keys, values = (t.new_empty(*t.shape[:2], steps, t.shape[3], dtype=dtype) for t in (call.key, call.value))
        return cls(keys, values, call.query.new_empty(steps, *call.query[:, :, 0].shape))

    def append(self, call: AttentionCall) -> None:
        self.keys[:, :, self.count] = call.key[:, :, 0]
        self.values[:, :, self.count] = call.value[:, :, 0]
        self.queries[self.count] = call.query[:, :, 0]
        self.count += 1

    def attend(self, row: int, query: Tensor, held: HeldHeads, how: Sequence[Any]) -> Tensor:
        """Attention of one row's newest token in some KV heads. query [heads, dim] -> the same"""
        heads, keys, values = held
        new_keys, new_values = (part[row, heads, : self.count] for part in (self.keys, self.values))
        scale, softcap, sink_logits = how
        grouped = query.to(keys.dtype).unflatten(0, (len(keys), -1))
        logits = torch.cat([grouped @ keys.mT, grouped @ new_keys.mT], -1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        if sink_logits is not None:
            logits = torch.cat([logits, sink_logits.to(logits.dtype).view(*logits.shape[:2], 1)], -1)
        probs = logits.softmax(-1).to(values.dtype)
        text, own = probs.tensor_split([keys.shape[1]], -1)
        output = text @ values + own[..., : self.count] @ new_values
        return output.flatten(0, 1).to(query.dtype)


class HeldDraft(HFCacheAdapter):
    """What the model sees of drafts whose steps are not captured: one token for every row."""

    seen = 1  # not empty; every row has position ids of its own

    def load(self, texts: Sequence[DraftText], steps: int) -> None:
        self.texts, self.steps = texts, steps
        self.own: dict[int, OwnTokens] = {}  # by layer

    def queries(self, row: int, steps: int) -> dict[int, Tensor]:
        """A row's queries of all steps so far, by layer. [heads, steps, dim]"""
        return {i: own.queries[:steps, row].transpose(0, 1).clone() for i, own in self.own.items()}

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if index not in self.own:
            self.own[index] = OwnTokens.like(call, self.steps, self.texts[0].store[index].kind.dtype)
        own = self.own[index]
        own.append(call)
        group = call.query.shape[1] // own.keys.shape[1]
        rows = []
        for row, held in enumerate(self._held(index, own.keys.shape[1])):
            outputs = []
            for part in held:
                mine = slice(part[0].start * group, part[0].stop * group)
                sinks = None if call.sink_logits is None else call.sink_logits[mine]
                outputs.append(own.attend(row, call.query[row, mine, 0], part, (call.scale, call.softcap, sinks)))
            rows.append(torch.cat(outputs))
        return call.to_hf_output(torch.stack(rows)[:, :, None])

    def _held(self, index: int, kv_heads: int) -> Iterator[list[HeldHeads]]:
        """Each row's tokens of the text, without the last one."""
        for text in self.texts:
            flat, segments = text.store[index].flat, text.segments(index)
            for first in range(0, len(segments), kv_heads):
                yield held_heads(flat, segments[first : first + kv_heads])


def held_heads(flat: Tokens, segments: Sequence[tuple[int, int]]) -> list[HeldHeads]:
    """Views of a row's KV heads: of all at once where they are equally long, else of each."""
    stride = uniform_stride(segments)
    if not stride:
        return [
            (slice(h, h + 1), flat.keys[None, start : start + n], flat.values[None, start : start + n])
            for h, (start, n) in enumerate(segments)
        ]
    start, length = segments[0]
    keys, values = (
        part[start:].as_strided((len(segments), length, part.shape[1]), (stride * part.stride(0), *part.stride()))
        for part in (flat.keys, flat.values)
    )
    return [(slice(0, len(segments)), keys, values)]
