"""A folder for blocks that do not fit in host memory; removed when the process ends, or when the next one starts."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from itertools import count
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from kvkeep.arguments import check_value
from kvkeep.errors import BadParameter, StoreFull

PREFIX, LOCK = "kvkeep-", "alive"


class DiskStore:
    """Files are memory-mapped: retrieving from a block reads only the pages needed."""

    def __init__(self, parent: str | Path) -> None:
        check_value("disk", parent, str | os.PathLike)
        parent = Path(parent)
        if not parent.is_dir():
            raise BadParameter(f"disk={str(parent)!r} is not a folder; make it first.")
        remove_stale(parent)
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:
            raise BadParameter(f"disk={str(parent)!r} cannot be written to ({error.strerror}).") from None
        self.lock = _locked(self.folder / LOCK, new=True)
        self.counter = count()
        self.close = weakref.finalize(self, _remove, self.folder, self.lock)

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """-> the same tensors, memory-mapped from a file"""
        path = self.folder / f"{next(self.counter)}.safetensors"
        try:
            save_file({"keys": keys.contiguous(), "values": values.contiguous()}, path)
        except Exception as error:  # safetensors wraps what the system said
            path.unlink(missing_ok=True)
            raise StoreFull(
                f"tokens could not be written to {str(self.folder)!r}: {error}. Nothing was lost."
            ) from None
        mapped = load_file(path)
        self.last_path = path
        return mapped["keys"], mapped["values"]

    def delete_last_with(self, owner: object) -> None:
        """Delete the file written last when its owner is garbage-collected; the folder goes at exit anyway."""
        weakref.finalize(owner, self.last_path.unlink, missing_ok=True).atexit = False


def remove_stale(parent: Path) -> None:
    """Remove the folders of processes that are gone: their lock is free."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            held = _locked(folder / LOCK)
        except OSError:  # in use, not readable, or not a folder of this kind
            continue
        _remove(folder, held)


def _locked(path: Path, new: bool = False) -> int:
    """A file descriptor that holds the lock as long as the process lives."""
    lock = os.open(path, os.O_RDWR | (os.O_CREAT if new else 0))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise
    return lock


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
