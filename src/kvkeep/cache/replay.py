"""A text is fed to the model again, part by part, before anything of it is evicted, if its method asks for that.

    prefill ─► layers hold the whole text ─► a forward pass for each part, which appends nothing ─► evict, all layers
                                             every layer: `ReplayMemory.score` of the part's tokens

Until the last step, the layers are as the prefill left them: cut short at any time, the text is whole, and the next
forward pass begins with feeding it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache as cache_results
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache_state import CacheState
from kvkeep.cache.padding import BatchLayout
from kvkeep.compress.protocols import ReplayMemory
from kvkeep.compress.scorers.repetition import output_gram
from kvkeep.errors import CacheMisuse, UnsupportedModel
from kvkeep.kernels.dispatch import appended_attention, segment_attention
from kvkeep.model.chat import common_prefix_length, end_of_message, start_of_message
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter, context_length, execution_device
from kvkeep.model.projections import hidden_norms, output_weight
from kvkeep.model.rope import position_limit
from kvkeep.model.user_text import ids_of
from kvkeep.storage.history import StreamedLayers
from kvkeep.storage.ragged import RaggedLayer
from kvkeep.types import Replayed, ReplayPass

LayerRows = dict[tuple[int, int], Tensor]  # by layer and row
Replays = list[tuple[ReplayMemory, str | None, LayerRows]]  # of one text: who scored it, how it is stored, scores


def no_call() -> None:
    """Nobody else uses the model."""


@dataclass(frozen=True)
class RowText:
    """The tokens of one row that were not fed again yet, the last of those it has seen, and the position after them."""

    ids: list[int]
    position: int


@dataclass(frozen=True)
class Unreplayed:
    """What a cache has to remember from a prefill to its replay."""

    rows: list[RowText] = field(default_factory=list)
    layout: BatchLayout | None = None  # of the last forward pass, before its tokens are known
    due: list[bool] | None = None  # rows that are evicted from after the replay; None: the prompt goes on

    def begin(self, layout: BatchLayout) -> Unreplayed:
        """After a forward pass. Tokens that were decoded, or follow a context, are not fed again."""
        if layout.evict_later is None:
            return Unreplayed()
        return replace(self, layout=layout, due=layout.evict_later if any(layout.evict_later) else None)

    def add(self, ids: Tensor, positions: Tensor | None, padded_length: int) -> Unreplayed:
        """The tokens of that pass, and where they stand. ids [rows, q], padded_length: with them"""
        assert self.layout is not None
        q, counts = ids.shape[1], self.layout.counts
        if positions is None:
            positions = torch.arange(padded_length - q, padded_length)[None]
        where = positions.reshape(-1, *positions.shape[-2:])[0].expand(len(ids), -1).tolist()
        columns = [c.tolist() for c in self.layout.token_columns or [torch.arange(q)] * len(counts)]
        before = self.rows or [RowText([], 0)] * len(counts)
        rows = [
            RowText([*old.ids, *(row[c] for c in mine)], at[mine[-1]] + 1 if mine else old.position)
            for old, row, mine, at in zip(before, ids.tolist(), columns, where, strict=True)
        ]
        return replace(self, rows=rows, layout=None)

    def check_done(self, method: str) -> None:
        """Refuse to go on with a text that should have been fed again."""
        if self.due or self.layout:
            raise CacheMisuse(
                f"'{method}' runs the model again before it evicts, and that is not done: the forward pass did not "
                "tell its tokens, or was cut short. Call the model itself, not a compiled or wrapped one, with "
                "input_ids and with past_key_values= by name (inputs_embeds cannot be fed again)."
            )


class ReplayForward(HFCacheAdapter):
    """What the model sees of a cache while a text is fed again: new tokens attend to a row and to each other."""

    seen = 0  # every token has a position id

    def __init__(
        self,
        model: Any,
        memory: ReplayMemory,
        store: Mapping[int, RaggedLayer],
        tokenizer: Any,
        between: Callable[[], None] = no_call,
    ) -> None:
        """between: called after every part"""
        super().__init__(model)
        self.memory, self.store, self.tokenizer, self.between = memory, store, tokenizer, between
        self.row, self.behind = 0, slice(0)  # the row, and its part that is fed, counted from the row's end
        self.last = model.config.get_text_config(decoder=True).num_hidden_layers - 1
        self.norms: dict[int, Tensor] = {}
        self.gram = cache_results(lambda index: output_gram(output_weight(model, index)))  # of a layer
        self.scores: LayerRows = {}  # of the tokens fed so far [kv_heads, tokens]
        self.nbytes = 0  # of the keys and values that one layer has of a part, at most

    @torch.no_grad()
    def __call__(self, rows: Sequence[RowText]) -> LayerRows:
        """Scores of all tokens of these texts. [kv_heads, tokens]"""
        with hidden_norms(self.model, self.compressed_layers if self.memory.needs_output else []) as self.norms:
            for self.row, text in enumerate(rows):
                tokens, room = len(text.ids) - self._begun(text), context_length(self.model) - text.position
                for part in self.memory.passes(tokens, room):
                    self._feed(text, part)
                    self.between()
        return self.scores

    def _feed(self, text: RowText, part: ReplayPass) -> None:
        start, end = (self._begun(text) + each for each in (part.start, part.end))
        self.behind = slice((start if part.start else 0) - len(text.ids), end - len(text.ids) or None)
        lead, repeated = text.ids[start - part.lead : start], text.ids[start:end]
        ids = torch.tensor([self._say(part.instruction) + lead + self._end + repeated])
        limit, device = position_limit(self.model, text.position), execution_device(self.model)
        first = max(0, min(text.position, limit - ids.shape[1]))  # earlier, where there are no positions after the text
        positions = (first + torch.arange(ids.shape[1])).clamp_max(limit - 1)
        self.model(ids.to(device), position_ids=positions[None].to(device), past_key_values=self, logits_to_keep=1)

    def _begun(self, text: RowText) -> int:
        """Tokens that the chat template puts before a message: scored with the first part, but not repeated."""
        begun = common_prefix_length(self._start, text.ids)
        return begun if begun < len(text.ids) else 0

    def _say(self, text: str) -> list[int]:
        return ids_of(self.tokenizer, text) if self.tokenizer else []

    @cached_property
    def _start(self) -> list[int]:
        return start_of_message(self.tokenizer) if self.tokenizer else []

    @cached_property
    def _end(self) -> list[int]:
        return end_of_message(self.tokenizer) if self.tokenizer else []

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        keys, values, part = self._held(index)
        scores = self.scores.get((index, self.row))
        self.nbytes = max(self.nbytes, call.key.nbytes + call.value.nbytes)
        new = self.memory.score(self._replayed(index, call, keys, values, part))
        self.scores[index, self.row] = new if scores is None else torch.cat([scores, new], 1)
        if index == self.last:  # nobody reads its output
            return call.to_hf_output(call.value.new_zeros(*call.query.shape[:3], call.value.shape[-1]))
        keys, values = ([self._attended(head, part) for head in heads] for heads in (keys, values))
        return call.to_hf_output(_attend_appended(call, keys, values))

    def _held(self, index: int) -> tuple[Sequence[Tensor], Sequence[Tensor], slice]:
        """A row's keys and values, of each head, and where its part stands in them. [n, dim]

        From the host come those alone that are used.
        """
        if isinstance(self.store, StreamedLayers) and self.memory.local:
            tokens = self.store.history.tokens
            start, end = tokens + self.behind.start, tokens + (self.behind.stop or 0)
            keys, values = self.store.part(index, self.memory.sinks, start, end)
            return list(keys), list(values), slice(start - end, None)
        heads = self.store[index].row(self.row)
        return [head.keys for head in heads], [head.values for head in heads], self.behind

    def _attended(self, head: Tensor, part: slice) -> Tensor:
        """All tokens of a head, or the first ones and those that are fed again. [n, dim]"""
        if not self.memory.local:
            return head
        return torch.cat([head[: part.start][: self.memory.sinks], head[part]])

    def _replayed(
        self, index: int, call: AttentionCall, keys: Sequence[Tensor], values: Sequence[Tensor], part: slice
    ) -> Replayed:
        first = min(self.memory.sinks, *(len(head[: part.start]) for head in keys))
        repeated, read = (torch.stack([head[part] for head in heads]) for heads in (keys, values))
        sinks = torch.stack([head[:first] for head in keys])
        gram = self.gram(index) if self.memory.needs_output else None
        norms = self.norms[index][0] if self.memory.needs_output else None
        return Replayed(call.query[0], call.key[0], repeated, read, sinks, *call.how, gram, norms)


def replay_scores(cache: CacheState, known: Replays) -> LayerRows:
    """Score the tokens that were not fed again yet, if the method wants them to be."""
    if not (replay := cache.method.replay):
        return {}
    for memory, storage, scores in known:
        if (memory, storage) == (replay, cache.storage):
            return scores
    between = cache.pass_end.between_passes
    forward = ReplayForward(cache.model, replay, cache.backend.prompt, cache.tokenizer, between)
    known.append((replay, cache.storage, forward(cache.unreplayed.rows)))
    cache.backend.count_beside(forward.nbytes)
    return known[-1][2]


def _attend_appended(call: AttentionCall, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Over each head's tokens, followed by the new ones of the one row. keys, values: of each KV head [n, dim]"""
    q = call.query.shape[2]
    held_keys, held_values = stacked_view(keys), stacked_view(values)
    if held_keys is not None and held_values is not None and call.softcap is None and call.sink_logits is None:
        parts = call.query, held_keys[None], held_values[None], call.key, call.value, call.scale
        if appended_attention.uses_kernel(*parts):
            return appended_attention(*parts)
    lengths = [len(each) + q for each in keys]
    segments = list(zip(accumulate(lengths, initial=0), lengths, strict=False))
    flat_keys, flat_values = (
        torch.cat([part for pair in zip(old, new[0], strict=True) for part in pair])
        for old, new in ((keys, call.key), (values, call.value))
    )
    return segment_attention(call.query, flat_keys, flat_values, segments, [q], *call.how)


def stacked_view(parts: Sequence[Tensor]) -> Tensor | None:
    """Parts of one shape that lie equally far from each other in one storage, as one tensor; None if they do not."""
    first = parts[0]
    step = parts[1].storage_offset() - first.storage_offset() if len(parts) > 1 else first.numel()
    for i, part in enumerate(parts):
        alike = part.shape == first.shape and part.stride() == first.stride() and part.dtype == first.dtype
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not alike or not same or part.storage_offset() != first.storage_offset() + i * step or step < 0:
            return None
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()))


def check_can_replay(cache: CacheState, intercepted: bool) -> None:
    """Refuse a model whose text cannot be fed again beside its cache."""
    method, reason = cache.method.name, ""
    if cache.hf_layers and cache.compressed_layers:
        reason = "it has sliding-window or linear layers, which cannot attend without changing what they hold"
    elif cache.method.draft and cache.model.get_output_embeddings() is None:
        reason = "it has no output embeddings, and can draft no tokens"
    elif cache.shards:
        reason = f"tensor parallelism splits its heads over {cache.shards.size} processes"
    elif not intercepted:
        reason = (
            "its forward pass is compiled, or replaced by somebody else (accelerate's device_map), and hides its tokens"
        )
    if reason:
        raise UnsupportedModel(
            f"'{method}' runs the model again after a prompt, and cannot with this {cache.name}: {reason}; use one "
            "that does not, such as 'echo' or 'snapkv'."
        )
