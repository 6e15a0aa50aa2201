"""A layer's positions and append buffers."""

import pytest
import torch
from draws import CPU

from kvkeep.storage.offload.host import HostMemoryBudget, HostStore
from kvkeep.storage.offload.layer_state import AppendBuffer, LayerState, Retrieved


def test_append_buffers_that_share_memory_do_not_see_each_other():
    def put(buffer, value, count):
        buffer = buffer.grow(count)
        buffer.last(count).fill_(value)
        return buffer

    def seen(buffer):
        return buffer.all[1, :, 0].tolist()

    first = put(AppendBuffer.empty_like(torch.zeros(2, 1, 3), torch.float32), 1.0, 2)
    one = put(first, 2.0, 3)
    other = put(first, 3.0, 1)  # the room behind it is taken
    assert one.buffer is first.buffer and other.buffer is not first.buffer
    long = put(one, 4.0, 500)
    assert [seen(each) for each in (first, one, other)] == [[1] * 2, [1] * 2 + [2] * 3, [1] * 2 + [3]]
    assert seen(long) == [1] * 2 + [2] * 3 + [4] * 500 and long.nbytes == long.buffer.nbytes > 505 * 2 * 3 * 4
    with torch.inference_mode():
        again = put(long, 5.0, 200)
    assert seen(put(again, 6.0, 1))[-2:] == [5, 6]  # outside, too


@pytest.mark.core
def test_positions_of_a_layer_state():
    near, host = (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)), HostStore(HostMemoryBudget(), CPU)
    assert LayerState(near, host, seen=3).positions() == [[0, 1, 2]] * 2
    pair, where = (torch.zeros(2, 2, 4),) * 2, (torch.tensor([[4, 2], [3, 2]]), torch.tensor([[3, 5], [4, 5]]))
    state = LayerState(near, host, seen=9, sinks=pair, offloaded_positions=where)
    assert state.positions() == [[0, 1, 6, 7, 8]] * 2 and state.device_tokens == 5
    state = LayerState(
        near,
        host,
        9,
        sinks=pair,
        offloaded_positions=where,
        retrieved=Retrieved(None, torch.tensor([[0, 2], [0, 3]]), pair),
    )
    assert state.positions() == [[0, 1, 3, 4, 6, 7, 8], [0, 1, 3, 5, 6, 7, 8]]
    assert state.device_tokens == 7 and state.nbytes == 2 * 2 * 7 * 4 * 4 and state.near_start == 6
    one = LayerState(
        near,
        host,
        9,
        offloaded_positions=(torch.tensor([[4, 2]]),),
        retrieved=Retrieved(None, torch.tensor([[0, 1]]), pair),
    )
    assert one.positions() == [[2, 4, 6, 7, 8]] * 2  # one choice for all heads
