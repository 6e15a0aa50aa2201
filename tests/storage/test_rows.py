"""Free slots are handed out once, and join when they are freed."""

import pytest

from kvkeep.storage.places import FreeList


def test_free_list():
    free = FreeList(10)
    a, b, c = free.allocate(3), free.allocate(3), free.allocate(4)
    assert (a, b, c, free.largest) == (0, 3, 6, 0)
    with pytest.raises(MemoryError, match="no span of 1"):
        free.allocate(1)
    free.free(a, 3)
    free.free(c, 4)
    assert (free.spans, free.largest) == ([(0, 3), (6, 4)], 4)
    free.free(b, 3)
    assert free.spans == [(0, 10)] and FreeList(0).largest == 0
