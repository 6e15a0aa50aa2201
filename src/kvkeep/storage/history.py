"""The whole of a sequence, on the host: what a method evicts from the device, the next turn attends to.

Keys and values of BLOCK tokens are a block. Blocks never change, so sequences with one beginning share its blocks. The
newest tokens, which fill no block yet, stay on the device. A forward pass reads and appends layer after layer:

    begin ─► every layer: read what came before, append its own ─► commit, or rollback

With a GPU, blocks are in pinned memory, and the next layer is copied while it computes with the last (read_ahead.py).
"""

from __future__ import annotations

import heapq
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise, takewhile
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kvkeep.kernels.torch.quantization import GROUP_SIZE, pack_codes, quantize, unpack_codes
from kvkeep.storage.offload.pinned import allocate_pinned
from kvkeep.storage.ragged import RaggedLayer
from kvkeep.storage.read_ahead import Read, ReadAhead

BLOCK = 64  # tokens
SLAB_BYTES = 2**26  # of one layer, at most; at least a block
SLAB_BLOCKS = 64

T = TypeVar("T")
Pair = tuple[Tensor, Tensor]  # keys and values [kv_heads, n, dim]


@dataclass(frozen=True)
class BlockFormat:
    """How the keys and values of a layer lie in the bytes of a block."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    bits: int | None = None  # 8 or 4, as in kernels/torch/quantization.py; None: the dtype's own numbers

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, bits: int | None) -> BlockFormat:
        return cls(len(keys), keys.shape[-1], values.shape[-1], keys.dtype, bits)

    @property
    def parts(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of what a block consists of."""
        heads, size = self.kv_heads, self.dtype
        if self.bits is None:
            return [(size, (heads, BLOCK, self.key_dim)), (size, (heads, BLOCK, self.value_dim))]
        groups, codes = BLOCK // GROUP_SIZE, self.bits
        of_keys = (heads, groups, GROUP_SIZE, self.key_dim * codes // 8)
        of_values = (heads, groups, GROUP_SIZE, self.value_dim * codes // 8)
        per_group, per_token = (heads, groups, 1, self.key_dim), (heads, groups, GROUP_SIZE, 1)
        return [
            (torch.uint8, of_keys), (size, per_group), (size, per_group),
            (torch.uint8, of_values), (torch.float32, per_token), (torch.float32, per_token),
        ]  # fmt: skip

    @cached_property
    def nbytes(self) -> int:
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.parts)

    def encode(self, keys: Tensor, values: Tensor) -> Tensor:
        """Whole blocks. keys, values [kv_heads, n * BLOCK, dim] -> [n, nbytes] uint8"""
        blocks = [t.unflatten(1, (-1, BLOCK)).transpose(0, 1) for t in (keys, values)]
        if self.bits:
            keys, values = (t.unflatten(2, (-1, GROUP_SIZE)) for t in blocks)
            coded = quantize(keys, 3, self.bits, self.dtype), quantize(values, 4, self.bits, torch.float32)
            blocks = [part for codes, *rest in coded for part in (pack_codes(codes, self.bits), *rest)]
        return torch.cat([part.flatten(1).contiguous().view(torch.uint8) for part in blocks], 1)

    def empty(self, tokens: int, device: torch.device) -> Pair:
        """Room for keys and values of so many tokens. [kv_heads, tokens, dim]"""
        shapes = [(self.kv_heads, tokens, dim) for dim in (self.key_dim, self.value_dim)]
        keys, values = (torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes)
        return keys, values

    def decode(self, payload: Tensor, targets: Pair) -> None:
        """Reverse `encode`, but for what codes lose. [n, nbytes] -> keys, values [kv_heads, n * BLOCK, dim]"""
        ends = accumulate((dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.parts), initial=0)
        parts = [
            payload[:, start:end].view(dtype).unflatten(1, shape)
            for (start, end), (dtype, shape) in zip(pairwise(ends), self.parts, strict=True)
        ]
        if self.bits:
            parts = [self._numbers(*parts[:3]).flatten(2, 3), self._numbers(*parts[3:]).flatten(2, 3)]
        for target, part in zip(targets, parts, strict=True):
            target.unflatten(1, (-1, BLOCK)).copy_(part.transpose(0, 1))

    def _numbers(self, codes: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
        assert self.bits
        return (unpack_codes(codes, self.bits) * scales.float() + mins.float()).to(self.dtype)


class Slab:
    """Memory for some blocks: of each layer one tensor, so that neighbouring blocks are copied at once."""

    def __init__(self, blocks: int) -> None:
        self.layers: dict[int, Tensor] = {}  # [blocks, nbytes] uint8
        self.blocks = blocks
        self.free = list(range(blocks))  # a heap

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())


class HostPool:
    """The host memory that all histories of an engine use, and how their blocks are made."""

    def __init__(
        self, device: torch.device, bits: int | None = None, devices: Mapping[int, torch.device] | None = None
    ) -> None:
        """devices: of layers that are elsewhere"""
        self.device, self.bits, self.devices = device, bits, devices or {}
        self.most_blocks = sys.maxsize  # that anybody will take
        self.used: list[Any] = []  # an event of each GPU: when it has read and written all blocks so far
        self.formats: dict[int, BlockFormat] = {}  # by layer
        self.slabs: list[Slab] = []
        self.in_use = 0  # blocks
        self.lock = threading.Lock()
        self.ahead = {each: self.reads_ahead(each) for each in (device, *self.devices.values()) if each.type == "cuda"}
        self.read_lock = threading.Lock()  # buffers are one thread's at a time
        self.runs: tuple[list[Block], list[tuple[Slab, range]]] = [], []  # of the blocks of one layer, for the next

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, of all layers; 0 before the first forward pass."""
        return sum(form.nbytes for form in list(self.formats.values()))

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that somebody refers to."""
        return self.in_use * self.block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, in use or not."""
        return sum(slab.nbytes for slab in self.slabs)

    def take(self) -> Block:
        """Memory for a block, which is given back with the last reference to it."""
        with self.lock:
            slab = next((each for each in self.slabs if each.free), None)
            if slab is None:
                size = max(1, max((form.nbytes for form in self.formats.values()), default=1))
                slab = Slab(max(1, min(SLAB_BLOCKS, SLAB_BYTES // size, self.most_blocks - self.in_use)))
                self.slabs.append(slab)
            number = heapq.heappop(slab.free)
            self.in_use += 1
        block = Block(self, slab, number)
        weakref.finalize(block, self._give_back, slab, number).atexit = False
        return block

    def block_of(self, formats: dict[int, BlockFormat], payload: Tensor) -> Block:
        """A block of what was saved: all layers, one after the other. [nbytes] uint8"""
        known = self.formats or formats
        if formats != known or [*formats] != [*known] or len(payload) != sum(form.nbytes for form in known.values()):
            raise ValueError("it is of another model, dtype or storage")
        self.formats = known
        block = self.take()
        for event in self.used:  # its memory may have been somebody else's
            event.synchronize()
        parts = payload.split([form.nbytes for form in known.values()])
        for index, part in zip(known, parts, strict=True):
            block.layer(index).copy_(part)
        return block

    def empty(self, index: int, tokens: int) -> Pair:
        """Room for a layer's keys and values of so many tokens, on its device. [kv_heads, tokens, dim]"""
        return self.formats[index].empty(tokens, self._device(index))

    def read(self, index: int, blocks: Sequence[Block], targets: Pair) -> None:
        """Write a layer's keys and values of some blocks to `targets`, on the device. [kv_heads, tokens, dim]"""
        form, device = self.formats[index], self._device(index)
        ahead = self.ahead.get(device)
        if ahead is None:
            for part, first in self._parts(index, blocks):
                here = slice(first * BLOCK, (first + len(part)) * BLOCK)
                form.decode(part, (targets[0][:, here], targets[1][:, here]))
            return
        layers = [each for each in self.formats if self._device(each) == device]
        with self.read_lock:
            what = Read(index, (id(blocks[0]), id(blocks[-1]), len(blocks)), blocks)
            form.decode(ahead.read(what, layers), targets)
            ahead.done()

    def reads_ahead(self, device: torch.device) -> ReadAhead[Sequence[Block]]:
        """Buffers of a device, which hold the bytes of two layers of what is read."""

        def shape(read: Read[Sequence[Block]]) -> tuple[int, int]:
            return len(read.what), self.formats[read.index].nbytes

        def copy(read: Read[Sequence[Block]], payload: Tensor) -> None:
            for part, start in self._parts(read.index, read.what):
                payload[start : start + len(part)].copy_(part, non_blocking=True)

        return ReadAhead(device, shape, copy)

    def _parts(self, index: int, blocks: Sequence[Block]) -> Iterator[tuple[Tensor, int]]:
        """A layer's bytes of these blocks, of neighbours at once [n, nbytes] uint8, each with its first block."""
        start, known = 0, self.runs
        if known[0] != blocks:
            known = list(blocks), list(_runs(blocks))
        self.runs = ([], []) if index == max(self.formats) else known
        for slab, numbers in known[1]:
            yield self.layer(slab, index)[numbers.start : numbers.stop], start
            start += len(numbers)

    def _device(self, index: int) -> torch.device:
        return self.devices.get(index, self.device)

    def mark_used(self) -> list[Any]:
        """After a forward pass, ended or cut short. -> an event of each GPU"""
        self.runs = [], []
        for ahead in self.ahead.values():
            ahead.end()
        devices = {device for device in (self.device, *self.devices.values()) if device.type == "cuda"}
        self.used = [torch.cuda.current_stream(device).record_event() for device in devices]
        return self.used

    def _give_back(self, slab: Slab, number: int) -> None:
        self.in_use -= 1
        heapq.heappush(slab.free, number)  # from any thread, perhaps within `take`: a lock would wait for itself
        if len(slab.free) == slab.blocks and self.device.type == "cpu":  # pinned memory takes long to make
            with suppress(ValueError):
                self.slabs.remove(slab)

    def layer(self, slab: Slab, index: int) -> Tensor:
        """A layer's part of a slab. [blocks, nbytes] uint8"""
        if index not in slab.layers:
            size = self.formats[index].nbytes
            slab.layers[index] = allocate_pinned(slab.blocks * size, self.device).view(slab.blocks, size)
        return slab.layers[index]


@dataclass(eq=False)
class Block:
    """BLOCK tokens of all layers. Nobody writes to it once the forward pass that made it is committed."""

    pool: HostPool
    slab: Slab
    number: int
    written: Sequence[Any] = ()  # events: when the GPUs have written it

    def wait(self) -> None:
        """Until the host may read it."""
        for event in self.written:
            event.synchronize()

    def layer(self, index: int) -> Tensor:
        """[nbytes] uint8"""
        return self.pool.layer(self.slab, index)[self.number]


class LastRead(Generic[T]):
    """What was read of one layer. It is freed before that of another is read."""

    def __init__(self, read: Callable[[int], T]) -> None:
        self.read = read
        self.index, self.found = -1, list[T]()

    def __getitem__(self, index: int) -> T:
        if index != self.index:
            self.index, self.found = -1, []
            self.found = [self.read(index)]
            self.index = index
        return self.found[0]


class CommonBlocks:
    """Blocks that several histories begin with, read once for all of them, layer after layer."""

    def __init__(self, histories: Sequence[History]) -> None:
        alike = zip(*(known.blocks for known in histories), strict=False)
        same = takewhile(lambda blocks: all(each is blocks[0] for each in blocks), alike)
        self.pool, self.blocks = histories[0].pool, [blocks[0] for blocks in same]
        self.layers = LastRead(self._read)  # keys and values

    def _read(self, index: int) -> Pair:
        pair = self.pool.empty(index, len(self.blocks) * BLOCK)
        self.pool.read(index, self.blocks, pair)
        return pair


@contextmanager
def read_together(histories: Iterable[History]) -> Iterator[None]:
    """In one forward pass over several histories, read once what some of them begin with."""
    groups: dict[Block, list[History]] = {}
    for known in histories:
        if known.blocks:
            groups.setdefault(known.blocks[0], []).append(known)
    several = [group for group in groups.values() if len(group) > 1]
    for group in several:
        common = CommonBlocks(group)
        for known in group:
            known.common = common
    try:
        yield
    finally:
        for known in chain(*several):
            known.common = None


class History:
    """The keys and values of all tokens of one sequence, as its forward passes computed them."""

    def __init__(self, pool: HostPool, blocks: Sequence[Block] = ()) -> None:
        self.pool, self.blocks = pool, list(blocks)
        self.makes_blocks = True  # False: of tokens that nobody goes on after; they stay on the device
        self.tails: dict[int, Pair] = {}  # by layer: tokens that fill no block yet, on the device
        self.tokens = len(self.blocks) * BLOCK
        self.spare: list[Block] = []  # for tokens to come
        self.new_blocks: list[Block] = []  # of the forward pass under way
        self.new_tails: dict[int, Pair] = {}
        self.common: CommonBlocks | None = None  # with others of the forward pass under way

    @property
    def nbytes(self) -> int:
        """Bytes on the host, and of the newest tokens."""
        return self.tail_bytes + len(self.blocks) * self.pool.block_bytes

    @property
    def tail_bytes(self) -> int:
        """Bytes of the newest tokens, on the device."""
        return sum(part.nbytes for tail in self.tails.values() for part in tail)

    @property
    def full_bytes(self) -> int:
        """Bytes of all its tokens in the model's dtype."""
        forms = self.pool.formats.values()
        return self.tokens * sum(f.kv_heads * (f.key_dim + f.value_dim) * f.dtype.itemsize for f in forms)

    def until(self, tokens: int) -> History:
        """Another that goes on from here; after fewer tokens, it has their whole blocks alone."""
        if tokens < self.tokens:
            return History(self.pool, self.blocks[: tokens // BLOCK])
        copied = History(self.pool, self.blocks)
        copied.tails, copied.tokens = dict(self.tails), self.tokens
        return copied

    def reserve(self, blocks: int) -> None:
        """Have memory for so many blocks more, which counts as used from now on."""
        self.spare = [self.pool.take() for _ in range(blocks)][::-1]

    def read(self, index: int, start: int = 0, end: int = sys.maxsize, room: int = 0) -> Pair | None:
        """A layer's keys and values before this forward pass, on the device [kv_heads, tokens + room, dim]; None: none

        room: places behind them, for tokens to come
        """
        first, end = min(start // BLOCK, len(self.blocks)), min(end, self.tokens)
        if start >= end:
            return None
        blocks, tokens, filled = self.blocks[first : -(-end // BLOCK)], end - first * BLOCK, 0
        pair = self.pool.empty(index, max(len(blocks) * BLOCK, tokens) + room)
        if self.common and not first and len(blocks) >= len(self.common.blocks):
            common, blocks = self.common.layers[index], blocks[len(self.common.blocks) :]
            filled = common[0].shape[1]
            _copy(common, pair, 0, filled)
        if blocks:
            end_of_blocks = filled + len(blocks) * BLOCK
            self.pool.read(index, blocks, _between(pair, filled, end_of_blocks))
            filled = end_of_blocks
        if filled < tokens:
            _copy(self.tails[index], pair, filled, tokens)
        return _between(pair, start - first * BLOCK, tokens + room)

    def append(self, index: int, keys: Tensor, values: Tensor) -> None:
        """A layer's keys and values of the tokens of this forward pass. [kv_heads, q, dim]"""
        tail = self.tails.get(index)
        if tail is not None:
            keys, values = (torch.cat(both, 1) for both in zip(tail, (keys, values), strict=True))
        form = self.pool.formats.setdefault(index, BlockFormat.of(keys, values, self.pool.bits))
        whole = keys.shape[1] // BLOCK if self.makes_blocks else 0
        while len(self.new_blocks) < whole:
            self.new_blocks.append(self.spare.pop() if self.spare else self.pool.take())
        if whole:
            payload, start = form.encode(keys[:, : whole * BLOCK], values[:, : whole * BLOCK]), 0
            for slab, numbers in _runs(self.new_blocks[:whole]):
                target = self.pool.layer(slab, index)[numbers.start : numbers.stop]
                target.copy_(payload[start : start + len(target)], non_blocking=True)
                start += len(target)
        self.new_tails[index] = keys[:, whole * BLOCK :].clone(), values[:, whole * BLOCK :].clone()

    def commit(self) -> None:
        """The forward pass went through all layers."""
        if self.new_tails:
            written = self.pool.mark_used()
            for block in self.new_blocks:
                block.written = written
            self.blocks += self.new_blocks
            self.tails = {i: tail for i, tail in self.new_tails.items() if tail[0].shape[1]}
            tail = next(iter(self.new_tails.values()))[0]
            self.tokens = len(self.blocks) * BLOCK + tail.shape[1]
        self.new_blocks, self.new_tails = [], {}

    def rollback(self) -> None:
        """Forget the forward pass under way."""
        if self.new_tails:
            self.pool.mark_used()
            self.spare += self.new_blocks[::-1]
        self.new_blocks, self.new_tails = [], {}


class StreamedLayers(Mapping[int, RaggedLayer]):
    """The layers of a prompt that a history has. The last one that was read is on the device."""

    def __init__(self, layers: Sequence[int], history: History, read: Callable[[History, int], RaggedLayer]) -> None:
        self.layers, self.history = layers, history
        self.last = LastRead(lambda index: read(history, index))

    def __getitem__(self, index: int) -> RaggedLayer:
        return self.last[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def part(self, index: int, first: int, start: int, end: int) -> Pair:
        """Some tokens of a layer, after the first ones of those before them. [kv_heads, n, dim]"""
        both = self.history.read(index, 0, min(first, start)), self.history.read(index, start, end)
        keys, values = (torch.cat(parts, 1) for parts in zip(*filter(None, both), strict=True))
        return keys, values


def _between(pair: Pair, start: int, end: int) -> Pair:
    return pair[0][:, start:end], pair[1][:, start:end]


def _copy(source: Pair, target: Pair, start: int, end: int) -> None:
    for part, whole in zip(source, target, strict=True):
        whole[:, start:end] = part[:, : end - start]


def _runs(blocks: Sequence[Block]) -> Iterator[tuple[Slab, range]]:
    """Blocks that lie one behind the other."""
    start = 0
    for i, block in enumerate(blocks):
        following = blocks[i + 1] if i + 1 < len(blocks) else None
        if following is None or following.slab is not block.slab or following.number != block.number + 1:
            yield block.slab, range(blocks[start].number, block.number + 1)
            start = i + 1
