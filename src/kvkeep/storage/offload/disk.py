"""A folder for slabs that do not fit in host memory; gone at the end of the process, or at the next one's start."""

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

from kvkeep.errors import BadParameter, StoreFull

PREFIX, LOCK = "kvkeep-", "alive"


class Spill:
    """Files are memory-mapped: reading a slab reads only the pages asked for."""

    def __init__(self, parent: str | Path) -> None:
        parent = Path(parent)
        if not parent.is_dir():
            raise BadParameter(f"disk={str(parent)!r} is not a folder; make it first.")
        sweep(parent)
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:
            raise BadParameter(f"disk={str(parent)!r} cannot be written to ({error.strerror}).") from None
        self.lock = _locked(self.folder / LOCK, new=True)
        self.numbers = count()
        self.close = weakref.finalize(self, _remove, self.folder, self.lock)

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """-> the same tensors, mapped from a file"""
        path = self.folder / f"{next(self.numbers)}.safetensors"
        try:
            save_file({"keys": keys.contiguous(), "values": values.contiguous()}, path)
        except Exception as error:  # safetensors wraps what the system said
            path.unlink(missing_ok=True)
            raise StoreFull(
                f"tokens could not be written to {str(self.folder)!r}: {error}. Nothing was lost."
            ) from None
        mapped = load_file(path)
        self.newest = path
        return mapped["keys"], mapped["values"]

    def goes_with(self, holder: object) -> None:
        """Remove the file written last once this is gone; at the end of the process its folder goes anyway."""
        weakref.finalize(holder, self.newest.unlink, missing_ok=True).atexit = False


def sweep(parent: Path) -> None:
    """Remove what processes that are gone left behind: nobody holds their lock."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            held = _locked(folder / LOCK)
        except OSError:  # alive, not ours to look into, or no folder of this kind
            continue
        _remove(folder, held)


def _locked(path: Path, new: bool = False) -> int:
    """A descriptor that holds the lock as long as the process lives."""
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
