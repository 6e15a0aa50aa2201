"""Copies from the host that a device does not wait for: what is read next comes while it computes with the last.

    copy stream     layer 1 ─────► layer 2 ─────► layer 3 ─────►
    compute                        layer 1 ──►    layer 2 ──►

A forward pass reads the same things of every layer, in the same order. So what follows a read is known from the layer
before, and is copied into the second of two buffers. What was not foreseen is copied when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")  # what is read of each layer


class CopyStream:
    """A stream of a GPU beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def use(self) -> AbstractContextManager[Any]:
        """Copies in here begin when all is done that was asked of the device before."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def mark(self) -> Callable[[], None]:
        """-> a function that has the device wait for all copies so far, before what is asked of it next"""
        event = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)


class NoStream:
    """In its place without a GPU: copies are complete when they return."""

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Callable[[], None]:
        return lambda: None


@dataclass(frozen=True)
class Read(Generic[T]):
    """What is read of a layer. key: equal for what is the same of another layer"""

    index: int
    key: Hashable
    what: T


@dataclass
class Ahead(Generic[T]):
    """A copy under way."""

    read: Read[T]
    payload: Tensor
    wait: Callable[[], None]


class ReadAhead(Generic[T]):
    """Reads layer after layer to one device."""

    def __init__(
        self,
        device: torch.device,
        shape: Callable[[Read[T]], tuple[int, int]],
        copy: Callable[[Read[T], Tensor], None],
    ) -> None:
        """shape: of a layer's bytes [n, nbytes]; copy: to where they shall be, in the stream that is current"""
        self.shape, self.copy = shape, copy
        self.stream = CopyStream(device) if device.type == "cuda" else NoStream()
        self.now, self.next = (torch.empty(0, dtype=torch.uint8, device=device) for _ in "ab")  # buffers
        self.ahead: Ahead[T] | None = None
        self.is_last = False  # whether this layer is
        self.order, self.before = list[Read[T]](), list[Read[T]]()  # of this layer so far, and of the last one

    def read(self, read: Read[T], layers: Sequence[int]) -> Tensor:
        """A layer's bytes [n, nbytes] uint8, until `done`. layers: all that this device has, in the order of a pass"""
        if self.order and self.order[0].index != read.index:
            self.order, self.before = [], self.order
        self.order.append(read)
        self.is_last = read.index == layers[-1]
        self.now, self.next, found = self.next, self.now, self.ahead
        following = self._following(read, layers)
        if found is not None and (found.read.index, found.read.key) != (read.index, read.key):
            found.wait()  # it was in vain, and its buffer is needed
            found = None
        self.ahead = self._begin(following) if following else None  # first: copies follow each other without a pause
        if found is not None:
            found.wait()
            return found.payload
        self.now, payload = self._room(self.now, read)
        self.copy(read, payload)
        return payload

    def done(self) -> None:
        """What was read last was used. Where nothing comes next, nothing is held."""
        if self.ahead is None:
            self.now, self.next = self.now.new_empty(0), self.next.new_empty(0)
            if self.is_last:
                self.order, self.before = [], []

    def end(self) -> None:
        """After a forward pass, ended or cut short."""
        if self.ahead is not None:
            self.ahead.wait()
        self.ahead, self.is_last = None, True
        self.done()

    def _following(self, read: Read[T], layers: Sequence[int]) -> Read[T] | None:
        """What was read after it in the layer before; after the last, the first of the next layer."""
        keys = [each.key for each in self.before]
        if read.key not in keys:
            return None
        if (place := keys.index(read.key) + 1) < len(keys):
            return Read(read.index, keys[place], self.before[place].what)
        next_layers = layers[layers.index(read.index) + 1 :]
        return Read(next_layers[0], keys[0], self.before[0].what) if next_layers else None

    def _begin(self, read: Read[T]) -> Ahead[T]:
        """Copy beside what the device computes. It has used this buffer before."""
        self.next, payload = self._room(self.next, read)
        with self.stream.use():
            self.copy(read, payload)
        return Ahead(read, payload, self.stream.mark())

    def _room(self, buffer: Tensor, read: Read[T]) -> tuple[Tensor, Tensor]:
        """The buffer, or a larger one, and its part for this. It is allocated in the stream that computes."""
        rows, nbytes = self.shape(read)
        with torch.inference_mode(False):  # whoever reads next may write to it
            if len(buffer) < rows * nbytes:
                buffer = buffer.new_empty(rows * nbytes)
            return buffer, buffer[: rows * nbytes].view(rows, nbytes)
