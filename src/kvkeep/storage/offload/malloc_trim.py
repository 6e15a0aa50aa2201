"""Returns free memory to the system: kept tokens between freed tensors leave the allocator fragmented."""

from __future__ import annotations

import ctypes
from functools import cache


def trim() -> None:
    """Takes a few milliseconds; does nothing where the C library has no such call (it is glibc's)."""
    if call := _malloc_trim():
        call(0)


@cache
def _malloc_trim():
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
