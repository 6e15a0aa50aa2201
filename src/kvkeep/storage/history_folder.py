"""Blocks of histories on disk: one file each, written whole or not at all, and checked when it is read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvkeep.errors import BadCacheFile
from kvkeep.storage.history import Block, BlockFormat

SUFFIX = ".kvblock"
NAME, DRAFT = re.compile(r"[0-9a-f]{64}\.kvblock"), re.compile(r"\.[0-9a-f]{64}-\w+")  # of files, of our making
FORMAT = "kvkeep-block-1"

Saved = tuple[dict[int, BlockFormat], torch.Tensor]  # as `HostPool.block_of` takes them


class BlockFolder:
    """The least recently used go first."""

    def __init__(self, path: str | Path, max_bytes: int | None = None) -> None:
        """Find what was written before; remove what a process that was killed had begun to write.

        max_bytes: None: half of what the disk has beside others' files
        """
        self.path, self.lock = Path(path), threading.RLock()
        self.path.mkdir(parents=True, exist_ok=True)
        found = []
        for each in self.path.iterdir():
            if DRAFT.fullmatch(each.name):
                each.unlink(missing_ok=True)
            elif NAME.fullmatch(each.name) and each.is_file():
                stat = each.stat()
                found.append((stat.st_mtime, each.stem, stat.st_size))
        self.sizes = OrderedDict((name, size) for _, name, size in sorted(found))  # the least recently used first
        half = (shutil.disk_usage(self.path).free + self.nbytes) // 2
        self.max_bytes = half if max_bytes is None else max_bytes
        self._make_room(0)

    @property
    def nbytes(self) -> int:
        return sum(list(self.sizes.values()))

    def __contains__(self, name: str) -> bool:
        if name not in self.sizes:
            with suppress(OSError):  # another process may have written it
                self.sizes[name] = self._file(name).stat().st_size
        return name in self.sizes

    def use(self, name: str) -> None:
        """Note that a block is wanted."""
        with self.lock, suppress(KeyError, OSError):  # another process may have removed it
            self.sizes.move_to_end(name)
            os.utime(self._file(name))

    def write(self, name: str, block: Block) -> None:
        """OSError: it cannot be written, as on a full disk"""
        block.wait()
        payloads = [block.layer(i).numpy().tobytes() for i in block.pool.formats]
        forms = {i: asdict(form) | {"dtype": str(form.dtype)} for i, form in block.pool.formats.items()}
        digest = hashlib.sha256(b"".join(payloads)).hexdigest()
        head = json.dumps({"format": FORMAT, "layers": forms, "sha256": digest}).encode() + b"\n"
        size = len(head) + sum(map(len, payloads))
        if not self._make_room(size):
            return
        handle, draft = tempfile.mkstemp(prefix=f".{name}-", dir=self.path)
        try:
            with open(handle, "wb") as file:
                file.writelines([head, *payloads])
            os.replace(draft, self._file(name))
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
        self.sizes[name] = size

    def read(self, name: str) -> Saved | None:
        """Read a block. None: it is gone; BadCacheFile: it is damaged, and removed"""
        try:
            with self._file(name).open("rb") as file:
                head, payload = file.readline(), file.read()
            facts = json.loads(head)
            forms = {int(i): _format(form) for i, form in facts["layers"].items()}
            if facts["format"] != FORMAT or hashlib.sha256(payload).hexdigest() != facts["sha256"]:
                raise ValueError("it is not what was written")
            return forms, torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        except FileNotFoundError:
            self.sizes.pop(name, None)
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.remove(name)
            raise BadCacheFile(f"a block of a history was damaged ({error}); it is made again.") from error

    def remove(self, name: str) -> None:
        with self.lock:
            self.sizes.pop(name, None)
            self._file(name).unlink(missing_ok=True)

    def _make_room(self, size: int) -> bool:
        with self.lock:
            while self.sizes and self.nbytes + size > self.max_bytes:
                self.remove(next(iter(self.sizes)))
        return size <= self.max_bytes

    def _file(self, name: str) -> Path:
        return self.path / f"{name}{SUFFIX}"


def _format(facts: dict[str, Any]) -> BlockFormat:
    kind = getattr(torch, str(facts["dtype"]).removeprefix("torch."))
    if not isinstance(kind, torch.dtype):
        raise TypeError("no dtype")
    return BlockFormat(**{**facts, "dtype": kind})
