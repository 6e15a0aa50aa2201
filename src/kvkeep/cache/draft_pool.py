"""Decode steps of drafts, in buffers held from one prompt to the next: a step is captured once in a CUDA graph.

    load: what is kept of the texts ─► buffers     step: append, attend, write queries, next token     queries: of all

There is a graph for each number of rows that was needed so far (1, 2, 4, 8); a row too many writes to a slot nobody
reads. The buffers are held as long as the model lives, and grow with the rows and tokens of a draft (then all graphs
are captured again): to `most_held` of keys and values, and the queries of 8 rows (69 MB of an 8B model and 32 tokens).
Where nothing is captured, a draft reads the texts where they are held (held_draft.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.cache.draft_buffers import DraftSize, Kept, LayerBuffer
from kvkeep.kernels.dispatch import copy_segments
from kvkeep.model.cuda_graph import CudaGraphRunner
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter, execution_device, query_heads, single_device
from kvkeep.model.rope import last_position
from kvkeep.storage.ragged import LayerKind
from kvkeep.storage.upload import upload

DEVICES = {"cuda"}  # where steps are captured
MOST_ROWS = 8  # of one step
CHECKED = 8  # steps: after so many, whether all rows have ended
HELD_BYTES, HELD_SHARE = 2**31, 1 / 16  # of a GPU's memory, if that is more


class Drafted(NamedTuple):
    """Queries of every layer [rows, heads, steps, dim], and of each row how many predict its tokens up to an EOS."""

    queries: dict[int, Tensor]
    ends: list[int]  # more than there are steps, if there is no EOS


class DraftPool(HFCacheAdapter):
    """What the model sees of drafts: one token for every row."""

    seen = 1  # not empty; every row has position ids of its own
    captures = True

    def __init__(self, model: Any, state: Any = None) -> None:
        """state: of the model, which steps are captured of"""
        super().__init__(model)
        self.state, self.lock = state, Lock()
        self.last_position = last_position(model)
        self.free()

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None  # it drafts through this pool
        return model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = weakref.ref(model)  # not kept alive by a pool that is held

    def free(self) -> None:
        """Graphs and buffers."""
        self.runners: dict[int, CudaGraphRunner] = {}  # by number of rows
        self.size, self.buffers = DraftSize(), dict[int, LayerBuffer]()
        self.tables: dict[torch.device, Tensor] = {}  # starts and lengths of all layers, active rows

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def __call__(
        self, texts: Sequence[Kept], steps: int, between: Callable[[], None], most: int, eos: set[int], stop: bool
    ) -> Drafted:
        """So many steps, or fewer if it stops when every row has ended; the first is of each text's last token.

        between: called after every step; most: bytes the buffers may take, if these texts do not need more;
        eos: tokens that end a row
        """
        size = DraftSize.of(texts, steps)
        rows = 1 << (size.rows - 1).bit_length() if self.captures else size.rows
        with torch.inference_mode():  # only in this mode may its tensors be changed
            self.reserve(size | DraftSize(rows), {i: layer.kind for i, layer in texts[0].store.items()}, most)
            run = self.runner(rows)
            self._load(texts, steps)
            self.eos = upload(torch.tensor(sorted(eos), dtype=torch.int64), self.tokens.device)
            for done in range(1, steps + 1):
                run()
                between()
                if stop and done % CHECKED == 0 and max(self._ends(done, size.rows)) <= done:
                    break
        queries = {i: each.queries[:done, : size.rows].permute(1, 2, 0, 3).clone() for i, each in self.buffers.items()}
        return Drafted(queries, self._ends(done, size.rows))

    def _ends(self, steps: int, rows: int) -> list[int]:
        """Count each row's steps up to that which predicts an EOS; a row without one has more than so many."""
        ended = torch.isin(self.drafted[:steps, :rows], self.eos).cumsum(0) > 0
        return (1 + (~ended).sum(0)).tolist()

    # buffers

    def reserve(self, size: DraftSize, kinds: dict[int, LayerKind], most: int) -> None:
        """Make room, if there is not enough."""
        if kinds != {i: buffer.kind for i, buffer in self.buffers.items()}:
            self.free()
        elif size | self.size == self.size:
            return
        size = size | self.size
        part = max(1, (1 << size.slots.bit_length()) // 8)  # prompts that keep a little more find room
        queries = size.steps * size.rows * query_heads(self.model)
        left = most - sum(queries * kind.key_dim * kind.dtype.itemsize for kind in kinds.values())
        limit = left // sum(kind.slot_bytes for kind in kinds.values())
        size = size | DraftSize(slots=min(limit, -(-size.slots // part) * part))
        self.free()
        ends = list(accumulate((2 * size.rows * kind.kv_heads for kind in kinds.values()), initial=0))
        for device in {kind.device for kind in kinds.values()}:
            self.tables[device] = torch.zeros(ends[-1] + size.rows, dtype=torch.int64, device=device)
        for (i, kind), (start, end) in zip(kinds.items(), pairwise(ends), strict=True):
            table = self.tables[kind.device]
            self.buffers[i] = LayerBuffer(kind, size, table[start:end], table[ends[-1] :, None])
        home = execution_device(self.model)
        self.tokens, self.positions = torch.zeros(2, size.rows, 1, dtype=torch.int64, device=home)
        self.drafted = torch.zeros(size.steps, size.rows, dtype=torch.int64, device=home)
        self.step, self.size = torch.zeros(1, dtype=torch.int64, device=home), size

    def _load(self, texts: Sequence[Kept], steps: int) -> None:
        """Copy what is kept, with room for so many more tokens of every KV head."""
        self.awaiting = None  # of a step that was cut short
        rows = [row for text in texts for row in text.rows.values()]
        self._set_tables([self._segments(i, texts, steps) for i in self.buffers], len(rows))
        parts = [(i, at, text) for i in self.buffers for at, text in _numbered(texts)]
        spans = [text.spans(i) for i, _, text in parts]
        uploaded = {device: upload([number for span in spans for number in span], device) for device in self.tables}
        ends = accumulate(map(len, spans), initial=0)
        for (i, at, text), (start, end) in zip(parts, pairwise(ends), strict=True):
            buffer, flat = self.buffers[i], text.store[i].flat
            taken = uploaded[buffer.kind.device][start:end].view(2, -1)
            starts, total = buffer.starts[at : at + len(text.rows)].flatten(), sum(text.segments(i)[1])
            copy_segments(buffer.keys, buffer.values, starts, (flat.keys, flat.values), *taken, total)
        device = self.tokens.device
        self.tokens[: len(rows)] = upload([row.ids[-1:] for row in rows], device)
        self.positions[: len(rows)] = upload([[row.position - 1] for row in rows], device)

    def _segments(self, index: int, texts: Sequence[Kept], steps: int) -> tuple[list[int], list[int]]:
        """Start and length of every row and KV head of a layer; rows too many begin at the slot nobody reads."""
        lengths = [n for text in texts for n in text.segments(index)[1]]
        *starts, _ = accumulate((n + steps for n in lengths), initial=0)
        free = self.size.rows * self.buffers[index].kind.kv_heads - len(lengths)
        return starts + free * [self.size.slots], lengths + free * [0]

    def _set_tables(self, layers: Sequence[tuple[list[int], list[int]]], rows: int) -> None:
        numbers = [number for pair in layers for part in pair for number in part]
        numbers += [int(row < rows) for row in range(self.size.rows)]
        for device, table in self.tables.items():
            table.copy_(upload(numbers, device))
        self.step.zero_()
        self.tokens.zero_(), self.positions.zero_()

    # steps

    def runner(self, rows: int) -> Callable[[], Tensor]:
        """One decode step of the first rows."""
        if rows not in self.runners:
            self._set_tables([self._segments(i, [], 0) for i in self.buffers], 0)  # no row is in use
            weak = weakref.proxy(self)  # the runner is ours: buffers are freed with the model
            self.runners[rows] = CudaGraphRunner(lambda: weak.decode(rows), self.model)
            self.state = model_state(self.model)  # the first capture may have joined weights
        return self.runners[rows]

    def decode(self, rows: int) -> Tensor:
        tokens, positions = self.tokens[:rows], self.positions[:rows]
        out = self.model(tokens, position_ids=positions, past_key_values=self, logits_to_keep=1)
        tokens.copy_(out.logits[:, -1:].argmax(-1))
        positions.add_(1).clamp_max_(self.last_position)
        self.drafted[:, :rows].index_copy_(0, self.step, tokens.T)
        self.step.add_(1).clamp_max_(self.size.steps - 1)  # a capture runs it more often
        return tokens

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return call.to_hf_output(self.buffers[index].decode(call, self.step))


def _numbered(texts: Sequence[Kept]) -> list[tuple[int, Kept]]:
    """Each with the number of its first row among the rows of all."""
    firsts = accumulate((len(text.rows) for text in texts), initial=0)
    return list(zip(firsts, texts, strict=False))


def model_state(model: Any) -> Any:
    """What a captured step relies on: where the weights are, which adapters are used, and how it attends."""
    weights = [(weight.data_ptr(), weight.requires_grad) for weight in model.parameters()]
    return model.config.get_text_config(decoder=True)._attn_implementation, weights


def _can_capture(model: Any) -> bool:
    """Whether nothing but its weights decides what the model computes, where all drafts wait for each other."""
    kind = model.device.type
    if kind not in DEVICES or torch.is_autocast_enabled(kind):
        return False
    if kind == "cuda" and torch.cuda.current_stream(model.device) != torch.cuda.default_stream(model.device):
        return False
    return not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


_pools: weakref.WeakKeyDictionary[Any, DraftPool] = weakref.WeakKeyDictionary()


def _held_pool(model: Any) -> DraftPool | None:
    """The model's own, made anew where the model has changed; None where its steps cannot be captured."""
    if not _can_capture(model):
        return None
    pool, state = _pools.get(model), model_state(model)
    if pool is None or pool.state != state:
        if single_device(model) is None:
            return None
        pool = _pools[model] = DraftPool(model, state)
    return pool


@contextmanager
def pool_for(model: Any, nbytes: int) -> Iterator[DraftPool | None]:
    """The model's own pool, for so many bytes; None where nothing is captured, or another drafts."""
    pool = _held_pool(model) if nbytes <= most_held(model) else None
    if pool is None or not pool.lock.acquire(blocking=False):
        yield None
        return
    try:
        yield pool
    finally:
        pool.lock.release()


def most_held(model: Any) -> int:
    """Bytes of keys and values that drafts of this model may leave."""
    device = execution_device(model)
    if device.type != "cuda":
        return HELD_BYTES
    return max(HELD_BYTES, int(HELD_SHARE * torch.cuda.get_device_properties(device).total_memory))


def held_bytes(model: Any) -> int:
    """Bytes of the buffers that drafts of this model have left."""
    pool = _pools.get(model)
    return 0 if pool is None else pool.nbytes


def free_pool(model: Any) -> bool:
    """Unless a draft is under way in it. -> whether there was one to free"""
    pool = _pools.get(model)
    if pool is None or not pool.nbytes or not pool.lock.acquire(blocking=False):
        return False
    try:
        pool.free()
    finally:
        pool.lock.release()
    return True


def warmup(model: Any, rows: int, tokens: int, most: int) -> None:
    """After a first draft: room for so many rows that keep so many tokens, as far as memory goes, and their graphs."""
    if (pool := _pools.get(model)) is None or not pool.buffers:
        return
    kinds, steps = {i: buffer.kind for i, buffer in pool.buffers.items()}, pool.size.steps
    slots, most = max(kind.kv_heads for kind in kinds.values()) * (tokens + steps), min(most, most_held(model))
    rows, fits = min(rows, MOST_ROWS), most // (slots * sum(kind.slot_bytes for kind in kinds.values()))
    with pool.lock, torch.inference_mode():
        if fits:  # shorter prompts than the longest: more of them
            longest, padded = 1 << (tokens + steps - 1).bit_length(), 1 << (rows - 1).bit_length()
            pool.reserve(DraftSize(padded, min(rows, fits) * slots, longest, steps), kinds, most)
        for number in range(pool.size.rows.bit_length()):
            pool.runner(1 << number)
