"""What drafts are decoded from, and how: in a pool that the model keeps from one prompt to the next, or where it lies.

A step of a draft is captured once in a CUDA graph, for each number of rows that was needed so far (1, 2, 4, 8). The
pool is held as long as the model lives, and grows with the rows and tokens of a draft (then all graphs are captured
again): to `most_held` of keys and values, and the queries of 8 rows (69 MB of an 8B model and 32 tokens). Where nothing
is captured, a draft reads the texts where they are held (held_draft.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.decode.row_pool import RowPool, Segments
from kvkeep.cache.decode.runner import Runner
from kvkeep.cache.replay import RowText
from kvkeep.model.hf_cache import execution_device, key_shape, query_heads, single_device
from kvkeep.storage.ragged import RaggedLayer

DEVICES = {"cuda"}  # where steps are captured
MOST_ROWS = 8  # of one step
HELD_BYTES, HELD_SHARE = 2**31, 1 / 16  # of a GPU's memory, if that is more


@dataclass(frozen=True)
class DraftText:
    """What is kept of some rows of a cache for their drafts: with the text's last token, which is fed again."""

    store: dict[int, RaggedLayer]
    rows: dict[int, RowText]

    def segments(self, index: int) -> Segments:
        """First slot and length of every row and KV head of a layer, without the last token."""
        layer = self.store[index]
        mine = [row * layer.kv_heads + head for row in self.rows for head in range(layer.kv_heads)]
        return [(layer.starts[each], layer.lengths[each] - 1) for each in mine]


@dataclass(frozen=True)
class DraftSize:
    """What a pool has room for."""

    rows: int = 0
    slots: int = 0  # of a layer, over all rows and KV heads
    longest: int = 0  # tokens of one KV head
    steps: int = 0

    @classmethod
    def of(cls, texts: Sequence[DraftText], steps: int) -> DraftSize:
        layers = [[n + steps for text in texts for _, n in text.segments(i)] for i in texts[0].store]
        rows = sum(len(text.rows) for text in texts)
        longest = 1 << (max(max(each) for each in layers) - 1).bit_length()
        return cls(1 << (rows - 1).bit_length(), max(map(sum, layers)), longest, steps)

    def __or__(self, other: DraftSize) -> DraftSize:
        """Room for either."""
        return DraftSize(*map(max, vars(self).values(), vars(other).values()))


class DraftPool(RowPool):
    """Copies of the texts, a row for each, and the queries of all steps."""

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None  # it drafts through this pool
        return model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = weakref.ref(model)  # not kept alive by a pool that is held

    def load(self, texts: Sequence[DraftText], steps: int) -> None:
        """Copy what is kept, with room for so many more tokens of every KV head."""
        self.awaiting = None  # of a step that was cut short
        for row in list(self.allocated):
            self.release(row)
        for text in texts:
            segments = {i: text.segments(i) for i in self.compressed_layers}
            self.put(len(self.allocated), text.store, segments, steps)

    def queries(self, row: int, steps: int) -> dict[int, Tensor]:
        """A row's queries of all steps so far, by layer. [heads, steps, dim]"""
        return self.newest_queries(row, steps, steps)


class Drafts:
    """The pool of one model, and its captured steps."""

    def __init__(self, model: Any, state: Any) -> None:
        """state: of the model, which steps are captured of"""
        self.model, self.state, self.lock = weakref.ref(model), state, Lock()
        self.free()

    def free(self) -> None:
        self.size = DraftSize()
        self.runner: Runner | None = None

    @property
    def nbytes(self) -> int:
        return self.runner.pool.nbytes if self.runner else 0

    def reserve(self, size: DraftSize, most: int) -> Runner:
        """Make room, if there is not enough, in at most so many bytes, unless this size needs more."""
        if self.runner is None or size | self.size != self.size:
            size, model = self._rounded(size | self.size, most), self.model()
            self.free()
            pool = DraftPool(model, size.rows, size.slots, size.longest, window=size.steps)
            self.runner, self.size = Runner(pool, size.rows), size
        return self.runner

    def _rounded(self, size: DraftSize, most: int) -> DraftSize:
        """With some slots more, if memory allows: prompts that keep a little more find room."""
        part = max(1, (1 << size.slots.bit_length()) // 8)
        queries = query_bytes(self.model(), size.steps) * size.rows
        limit = (most - queries) // slot_bytes(self.model()) - 1
        return size | DraftSize(slots=min(limit, -(-size.slots // part) * part))

    def prepare(self, rows: int) -> None:
        """Capture the step of so many rows, if it was not yet."""
        assert self.runner is not None
        if rows not in self.runner.graphs:
            self.runner.prepare(rows)
            self.state = model_state(self.model())  # the first capture may have joined weights


def slot_bytes(model: Any) -> int:
    """Bytes of one token of one KV head, in all layers."""
    return 2 * key_shape(model)[1] * model.dtype.itemsize * model.config.get_text_config(decoder=True).num_hidden_layers


def query_bytes(model: Any, steps: int) -> int:
    """Bytes of one row's queries of so many steps."""
    return (steps + 2) * query_heads(model) * slot_bytes(model) // 2


def draft_tokens(model: Any, steps: int, kept: int) -> int:
    """Tokens per KV head that a draft of one row takes: those that are kept, its own, and as many as its queries."""
    return kept + steps + -(-query_bytes(model, steps) // (slot_bytes(model) * key_shape(model)[0]))


def model_state(model: Any) -> Any:
    """What a captured step relies on: where the weights are, which adapters are used, and how it attends."""
    weights = [(weight.data_ptr(), weight.requires_grad) for weight in model.parameters()]
    return model.config.get_text_config(decoder=True)._attn_implementation, weights


def _can_capture(model: Any) -> bool:
    """Whether nothing but its weights decides what the model computes, where all drafts wait for each other."""
    kind = model.device.type
    if kind not in DEVICES or torch.is_autocast_enabled(kind) or single_device(model) is None:
        return False
    if kind == "cuda" and torch.cuda.current_stream(model.device) != torch.cuda.default_stream(model.device):
        return False
    return not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


_drafts: weakref.WeakKeyDictionary[Any, Drafts] = weakref.WeakKeyDictionary()


@contextmanager
def drafts_of(model: Any, nbytes: int) -> Iterator[Drafts | None]:
    """The model's own, for so many bytes, made anew where the model has changed.

    None where its steps cannot be captured, or another drafts.
    """
    drafts = None
    if nbytes <= most_held(model) and _can_capture(model):
        drafts, state = _drafts.get(model), model_state(model)
        if drafts is None or drafts.state != state:
            drafts = _drafts[model] = Drafts(model, state)
    if drafts is None or not drafts.lock.acquire(blocking=False):
        yield None
        return
    try:
        yield drafts
    finally:
        drafts.lock.release()


def most_held(model: Any) -> int:
    """Bytes of keys and values that drafts of this model may leave."""
    device = execution_device(model)
    if device.type != "cuda":
        return HELD_BYTES
    return max(HELD_BYTES, int(HELD_SHARE * torch.cuda.get_device_properties(device).total_memory))


def held_bytes(model: Any) -> int:
    """Bytes of the pool that drafts of this model have left."""
    drafts = _drafts.get(model)
    return 0 if drafts is None else drafts.nbytes


def free_pool(model: Any) -> bool:
    """Free it, unless a draft is under way in it. -> whether there was one to free"""
    drafts = _drafts.get(model)
    if drafts is None or not drafts.nbytes or not drafts.lock.acquire(blocking=False):
        return False
    try:
        drafts.free()
    finally:
        drafts.lock.release()
    return True


def warmup(model: Any, rows: int, tokens: int, most: int) -> None:
    """After a first draft: room for so many rows that keep so many tokens, as far as memory goes, and their graphs."""
    if (drafts := _drafts.get(model)) is None or drafts.runner is None:
        return
    steps, most = drafts.size.steps, min(most, most_held(model))
    slots = key_shape(model)[0] * (tokens + steps)
    rows, fits = min(rows, MOST_ROWS), most // (slots * slot_bytes(model))
    with drafts.lock, torch.inference_mode():
        if fits:  # shorter prompts than the longest: more of them
            longest, padded = 1 << (tokens + steps - 1).bit_length(), 1 << (rows - 1).bit_length()
            drafts.reserve(DraftSize(padded, min(rows, fits) * slots, longest, steps), most)
        for number in range(drafts.size.rows.bit_length()):
            drafts.prepare(1 << number)
