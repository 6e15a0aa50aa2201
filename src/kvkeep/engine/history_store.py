"""The histories of conversations and texts, found by the tokens a prompt begins with.

What is stored are blocks of keys and values of all tokens (storage/history.py). A block is named by its tokens, all
tokens before it, and its owner, so a prompt goes on after the longest beginning that its owner, or everybody, has
stored. Answers are not stored as they were decoded, for decoding attended to what a method kept: the next turn
prefills them with its own message, over the whole history. So a turn sees what it would see of a prompt that is
prefilled whole, and whether something was stored changes no answer.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.cache.report import format_bytes
from kvkeep.compress.method import STORAGE
from kvkeep.engine.memory import half_of_host
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import BadCacheFile, BadParameter, StoreFull
from kvkeep.model.head_shards import agree_on_least, head_shards
from kvkeep.model.hf_cache import execution_device, fingerprint, key_shape, layer_devices, uncompiled
from kvkeep.storage import history
from kvkeep.storage.history import Block, BlockFormat, History, HostPool
from kvkeep.storage.history_folder import BlockFolder

PUBLIC = "public"  # everybody's


class HistoryStore:
    """Blocks by name. The least recently used go first; those of a text that is pinned stay."""

    def __init__(self, cache: Cache, max_bytes: int | None, storage: str | None) -> None:
        """cache: as sequences have one; max_bytes: None: half of what is free; storage: as in `Cache`"""
        model, bits, (kv_heads, dim) = cache.model, STORAGE[storage], key_shape(cache.model)
        if bits == 4 and dim % 2:
            raise BadParameter(f"history_storage='int4' halves keys, but those here have {dim} numbers; use 'int8'.")
        half = max(1, half_of_host() // (cache.shards.size if cache.shards else 1))
        self.max_bytes = half if max_bytes is None else max_bytes
        form = BlockFormat(kv_heads, dim, dim, model.dtype, bits)
        self._block_bytes = len(cache.compressed_layers) * form.nbytes  # of all layers, about
        self.pool = HostPool(execution_device(model), bits, layer_devices(model))
        self.pool.most_blocks = self.max_bytes // self._block_bytes
        self.model = ""  # whose keys and values these are, where others may be in the same folder
        self.blocks: OrderedDict[str, Block] = OrderedDict()  # the least recently used first
        self.pinned: Counter[str] = Counter()  # how often each block was pinned
        self.lock = threading.RLock()
        self.folder: BlockFolder | None = None
        self.device_lock: AbstractContextManager[Any] = nullcontext()
        self.num_unsaved = 0  # blocks that could not be written

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of all layers; until there is one, about."""
        return self.pool.block_bytes or self._block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that are stored, or that a sequence under way has."""
        return self.pool.used_bytes

    def begin(
        self, owner: str, config: SequenceConfig, ids: Tensor, from_message: int = 0, *, asks: bool = False
    ) -> Sequence:
        """A sequence that goes on after what is stored of this prompt, and whose history is kept if there is room.

        from_message: where the newest message begins; asks: nobody goes on after it, so nothing more is stored
        """
        known = self.find(owner, ids)
        known = known.until(agree_on_least(config.model, known.tokens))  # other processes may have dropped some of it
        sequence = sequence_after(known, config, ids, from_message)
        blocks = len(ids) // history.BLOCK - len(sequence.token_ids) // history.BLOCK
        has_room = bool(agree_on_least(config.model, not asks and self.make_room(blocks)))
        if not (has_room or asks or sequence.token_ids):
            return config.new_sequence()
        if (found := sequence.history) is not None:
            found.makes_blocks = has_room
            found.reserve(blocks if has_room else 0)
        return sequence

    def begin_text(self, owner: str, config: SequenceConfig, ids: Tensor) -> Sequence:
        """The same for a text that will be pinned. StoreFull: there is no room for it"""
        sequence = self.begin(owner, config, ids)
        if sequence.history is None or not sequence.history.makes_blocks:
            size = format_bytes(len(ids) // history.BLOCK * self.block_bytes)
            raise StoreFull(
                f"the keys and values of this text take {size}, and the rest of host_memory= is in use; remove other "
                "texts, or use more."
            )
        return sequence

    def find(self, owner: str, ids: Tensor) -> History:
        """The history of the longest beginning of these tokens that is stored."""
        with self.lock:
            found: list[str] = []
            for names in self._names(owner, ids):
                name = next((name for name in names if name in self.blocks), None)
                if name is None:
                    break
                found.append(name)
            for name in reversed(found):  # the first of them is the last to go
                self.blocks.move_to_end(name)
            return History(self.pool, [self.blocks[name] for name in found])

    def prepare(self, owner: str, ids: Tensor) -> None:
        """Read what `find` will find from disk, in the thread that submits a request: steps wait for no disk."""
        if not self.folder:
            return
        for names in self._names(owner, ids):
            if any(name in self.blocks for name in names):
                continue
            name = next((name for name in names if name in self.folder), None)
            if name is None or not self.make_room(1):
                return
            try:
                if (saved := self.folder.read(name)) is None:
                    return
                with self.device_lock, self.lock:
                    self.blocks[name] = self.pool.block_of(*saved)
            except (BadCacheFile, ValueError) as error:
                warnings.warn(str(error), stacklevel=2)
                return
            self.folder.use(name)

    def open(self, folder: Path, model: Any, writer: Executor, device_lock: AbstractContextManager[Any]) -> None:
        """Keep blocks in a folder, too; those of the same model are found again. Before anything is stored.

        writer: a thread, so that nobody waits for a disk; device_lock: held while memory is made for blocks, as no CUDA
        graph can be captured meanwhile
        """
        if not head_shards(uncompiled(model)):  # a file has all KV heads
            self.folder, self.writer, self.device_lock = BlockFolder(folder), writer, device_lock
            self.model = f"{fingerprint(model)} {model.dtype} {self.pool.bits}"

    def _save_all(self, names: Seq[str]) -> None:
        """The first of them is the last to be dropped from the disk."""
        folder = self.folder
        assert folder is not None
        for name in reversed(names):
            block = self.blocks.get(name)  # by name: one that is dropped meanwhile is not held
            try:
                if name in folder:
                    folder.use(name)
                elif block is not None:
                    folder.write(name, block)
            except Exception as error:  # such as a full disk: it is in memory all the same
                self.num_unsaved += 1
                warnings.warn(f"a block of a history could not be saved: {error}", stacklevel=1)

    def _names(self, owner: str, ids: Tensor) -> Iterator[tuple[str, str]]:
        """Give the names that the owner's own and public blocks of these tokens have."""
        return zip(_names(self.model, hashed(owner), ids), _names(self.model, PUBLIC, ids), strict=True)

    def add(self, owner: str, ids: Tensor, known: History, public: bool = False) -> None:
        """Store the blocks of a history, if it is that of these tokens. public: for all owners"""
        if known.tokens != len(ids):  # a pass that failed after its last layer was made again
            return
        names = list(_names(self.model, PUBLIC if public else hashed(owner), ids[: len(known.blocks) * history.BLOCK]))
        with self.lock:
            for name, block in reversed(list(zip(names, known.blocks, strict=True))):
                self.blocks.setdefault(name, block)
                self.blocks.move_to_end(name)
        if self.folder is not None:
            self.writer.submit(self._save_all, names)

    def make_room(self, blocks: int) -> bool:
        """Drop the least recently used for so many new blocks. -> whether there is room"""
        with self.lock:
            free = sum(not self.pinned[name] for name in self.blocks)  # but for those that sequences have, too
            if (self.pool.in_use - free + blocks) * self.block_bytes > self.max_bytes:  # nothing is dropped in vain
                return False
            while self.nbytes + blocks * self.block_bytes > self.max_bytes:
                if not self.evict_oldest():
                    return False
            return True

    def evict_oldest(self) -> bool:
        """Drop the least recently used block. -> whether there was one that is not pinned"""
        with self.lock:
            name = next((name for name in self.blocks if not self.pinned[name]), None)
            if name is not None:
                del self.blocks[name]
            return name is not None

    def pin(self, who: str, ids: Tensor) -> None:
        """Keep a text's blocks until `unpin`. who: a hashed owner, or PUBLIC"""
        with self.lock:
            self.pinned.update(_names(self.model, who, ids))

    def unpin(self, who: str, ids: Tensor) -> None:
        """Take one claim to a text's blocks back; those that nobody has a claim to are dropped."""
        names = list(_names(self.model, who, ids))
        with self.lock:
            self.pinned.subtract(names)
            self.pinned += Counter()  # drop those at zero
            gone = [name for name in names if not self.pinned[name]]
            for name in gone:
                self.blocks.pop(name, None)
        if self.folder is not None:
            for name in gone:
                self.writer.submit(self.folder.remove, name)  # after what is still to be saved


def hashed(owner: str) -> str:
    """Hash an owner, so that no folder tells an API key."""
    return hashlib.sha256(owner.encode()).hexdigest()


def sequence_after(known: History, config: SequenceConfig, ids: Tensor, from_message: int) -> Sequence:
    """A sequence that goes on after as much of a history as leaves its method the queries that it scores with.

    from_message: where the newest message begins
    """
    method, most = config.method, len(ids) - max(2, config.method.observation_window)  # one token is a decode step
    if method.scores_own_tokens:
        most = 0
    elif method.sums_queries:
        most = min(most, from_message)
    part, sequence = known.until(min(max(0, most), known.tokens)), config.new_sequence()
    sequence.continue_from(part, ids[: part.tokens].tolist(), from_message)
    return sequence


def _names(model: str, who: str, ids: Tensor) -> Iterator[str]:
    """A name for each block that these tokens fill: of its tokens, all before it, its owner and the model.

    who: a hashed owner, or PUBLIC
    """
    digest = hashlib.sha256(repr((history.BLOCK, model, who)).encode())
    data, size = memoryview(ids.numpy().tobytes()), history.BLOCK * ids.element_size()
    for end in range(size, len(data) + 1, size):
        digest.update(data[end - size : end])
        yield digest.hexdigest()
