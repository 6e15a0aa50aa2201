"""Keys and values that a GPU writes to host memory and reads from there by itself: no copy waits for the processor.

Slabs lie anywhere in pinned memory. A table on the device tells where each one's keys and values begin, and how many
tokens lie up to its end: [3, capacity] int64, as many columns filled as there are slabs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, power, quick

TOKENS = 8  # of a program: enough programs to keep a bus busy, few enough to be resident all at once


def put(keys: Tensor, values: Tensor, home: tuple[Tensor, Tensor], table: Tensor, slot: int, end: int) -> None:
    """Write a slab, and its column of the table.

    keys, values [kv_heads, n, dim], of any strides but the last, which is 1; home: the same shapes in pinned memory,
    contiguous
    """
    heads, n, dim = keys.shape
    wide = values.shape[-1]
    _put[heads, cdiv(n, TOKENS)](
        keys, values, home[0].data_ptr(), home[1].data_ptr(), table, table.shape[1], slot, end, n, *keys.stride()[:2],
        *values.stride()[:2], dim, wide, TOKENS, power(dim), power(wide), num_warps=4,
    )  # fmt: skip


def gather(
    index: Tensor, table: Tensor, count: int, keys: Tensor, values: Tensor, front: tuple[Tensor, Tensor] | None = None
) -> None:
    """Read tokens by number, counted through all slabs, into keys and values, behind those that stand in front.

    index [1 or kv_heads, k] int64, count: slabs, front: keys and values [kv_heads, f, dim], keys and values
    [kv_heads, f + k, dim]; all contiguous
    """
    index = index.contiguous()
    heads, total, dim = keys.shape
    wide, k = values.shape[-1], index.shape[1]
    _gather[heads, cdiv(total, TOKENS)](
        index, table, *(front or (keys, values)), keys, values, table.shape[1], count, count.bit_length(), total - k,
        total, k if index.shape[0] > 1 else 0, dim, wide, front is not None, TOKENS, power(dim), power(wide),
        num_warps=4,
    )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["capacity", "slot", "end", "n"])
def _put(
    keys, values, home_keys, home_values, table, capacity, slot, end, n, key_head, key_step, value_head, value_step,
    dim, wide, TOKENS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    channels, wides = tl.arange(0, DIM), tl.arange(0, WIDE)
    rows = head * n + tokens
    home_keys, home_values = home_keys.to(tl.int64), home_values.to(tl.int64)  # a low address comes with 32 bits
    to_keys = tl.multiple_of(home_keys.to(tl.pointer_type(keys.dtype.element_ty)), 16)
    to_values = tl.multiple_of(home_values.to(tl.pointer_type(values.dtype.element_ty)), 16)
    inside = (tokens < n)[:, None] & (channels < dim)[None, :]
    key = tl.load(keys + head * key_head + tokens[:, None] * key_step + channels[None, :], mask=inside)
    tl.store(to_keys + rows[:, None] * dim + channels[None, :], key, mask=inside)
    inside = (tokens < n)[:, None] & (wides < wide)[None, :]
    value = tl.load(values + head * value_head + tokens[:, None] * value_step + wides[None, :], mask=inside)
    tl.store(to_values + rows[:, None] * wide + wides[None, :], value, mask=inside)
    if (head == 0) & (block == 0):
        tl.store(table + slot, home_keys)
        tl.store(table + capacity + slot, home_values)
        tl.store(table + 2 * capacity + slot, end)


@quick
@triton.jit(do_not_specialize=["capacity", "count", "steps", "first", "total", "apart"])
def _gather(
    index, table, front_keys, front_values, keys, values, capacity, count, steps, first, total, apart, dim, wide,
    FRONT: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channels, wides, real = tl.arange(0, DIM), tl.arange(0, WIDE), (places >= first) & (places < total)
    token = tl.load(index + head * apart + places - first, mask=real, other=0)

    ends = table + 2 * capacity
    slab, last = tl.zeros([TOKENS], tl.int32), tl.zeros([TOKENS], tl.int32) + (count - 1)
    for _ in range(steps):  # the first slab that ends behind the token
        middle = (slab + last) // 2
        behind = tl.load(ends + middle) > token
        slab, last = tl.where(behind, slab, tl.minimum(middle + 1, last)), tl.where(behind, middle, last)
    before = tl.load(ends + slab - 1, mask=slab > 0, other=0)
    row = head * (tl.load(ends + slab) - before) + token - before

    from_keys = tl.multiple_of(tl.load(table + slab).to(tl.pointer_type(keys.dtype.element_ty)), 16)
    from_values = tl.multiple_of(tl.load(table + capacity + slab).to(tl.pointer_type(values.dtype.element_ty)), 16)
    to_keys = keys + (head * total + places)[:, None] * dim + channels[None, :]
    to_values = values + (head * total + places)[:, None] * wide + wides[None, :]
    inside = real[:, None] & (channels < dim)[None, :]
    tl.store(to_keys, tl.load(from_keys[:, None] + row[:, None] * dim + channels[None, :], mask=inside), mask=inside)
    inside = real[:, None] & (wides < wide)[None, :]
    value = tl.load(from_values[:, None] + row[:, None] * wide + wides[None, :], mask=inside)
    tl.store(to_values, value, mask=inside)
    if FRONT:
        row = head * first + places
        inside = (places < first)[:, None] & (channels < dim)[None, :]
        tl.store(to_keys, tl.load(front_keys + row[:, None] * dim + channels[None, :], mask=inside), mask=inside)
        inside = (places < first)[:, None] & (wides < wide)[None, :]
        value = tl.load(front_values + row[:, None] * wide + wides[None, :], mask=inside)
        tl.store(to_values, value, mask=inside)
