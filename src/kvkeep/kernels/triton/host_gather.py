"""Keys and values that a GPU writes to and gathers from pinned host memory by itself, without copies by the CPU.

Host blocks lie anywhere in pinned memory. A device table has, per block, the addresses of its keys and values and the
number of tokens up to its end: [3, capacity] int64, with as many columns filled as there are blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, fast_launch, pow2

TOKENS = 8  # per program: enough programs to saturate the bus, few enough to be resident together


def put(keys: Tensor, values: Tensor, home: tuple[Tensor, Tensor], table: Tensor, slot: int, end: int) -> None:
    """Write a host block and its column of the table.

    keys, values [kv_heads, n, dim], last stride 1; home: the same shapes, contiguous in pinned memory
    """
    heads, n, dim = keys.shape
    v_dim = values.shape[-1]
    _put[heads, cdiv(n, TOKENS)](
        keys, values, home[0].data_ptr(), home[1].data_ptr(), table, table.shape[1], slot, end, n, *keys.stride()[:2],
        *values.stride()[:2], dim, v_dim, TOKENS, pow2(dim), pow2(v_dim), num_warps=4,
    )  # fmt: skip


def gather(
    index: Tensor, table: Tensor, count: int, keys: Tensor, values: Tensor, front: tuple[Tensor, Tensor] | None = None
) -> None:
    """Gather tokens, indexed through all blocks, into keys and values, after those in front.

    index [1 or kv_heads, k] int64; count: of blocks; front: keys and values [kv_heads, f, dim]; keys and values
    [kv_heads, f + k, dim]; all contiguous
    """
    index = index.contiguous()
    heads, total, dim = keys.shape
    v_dim, k = values.shape[-1], index.shape[1]
    _gather[heads, cdiv(total, TOKENS)](
        index, table, *(front or (keys, values)), keys, values, table.shape[1], count, count.bit_length(), total - k,
        total, k if index.shape[0] > 1 else 0, dim, v_dim, front is not None, TOKENS, pow2(dim), pow2(v_dim),
        num_warps=4,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["capacity", "slot", "end", "n"])
def _put(
    keys, values, home_keys, home_values, table, capacity, slot, end, n, key_head, key_step, value_head, value_step,
    dim, v_dim, TOKENS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    channels, v_channels = tl.arange(0, DIM), tl.arange(0, V_DIM)
    rows = head * n + tokens
    home_keys, home_values = home_keys.to(tl.int64), home_values.to(tl.int64)  # Triton passes a low address as int32
    to_keys = tl.multiple_of(home_keys.to(tl.pointer_type(keys.dtype.element_ty)), 16)
    to_values = tl.multiple_of(home_values.to(tl.pointer_type(values.dtype.element_ty)), 16)
    inside = (tokens < n)[:, None] & (channels < dim)[None, :]
    key = tl.load(keys + head * key_head + tokens[:, None] * key_step + channels[None, :], mask=inside)
    tl.store(to_keys + rows[:, None] * dim + channels[None, :], key, mask=inside)
    inside = (tokens < n)[:, None] & (v_channels < v_dim)[None, :]
    value = tl.load(values + head * value_head + tokens[:, None] * value_step + v_channels[None, :], mask=inside)
    tl.store(to_values + rows[:, None] * v_dim + v_channels[None, :], value, mask=inside)
    if (head == 0) & (block == 0):
        tl.store(table + slot, home_keys)
        tl.store(table + capacity + slot, home_values)
        tl.store(table + 2 * capacity + slot, end)


@fast_launch
@triton.jit(do_not_specialize=["capacity", "count", "steps", "first", "total", "index_stride"])
def _gather(
    index, table, front_keys, front_values, keys, values, capacity, count, steps, first, total, index_stride, dim,
    v_dim, FRONT: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    slots = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channels, v_channels, is_gathered = tl.arange(0, DIM), tl.arange(0, V_DIM), (slots >= first) & (slots < total)
    token = tl.load(index + head * index_stride + slots - first, mask=is_gathered, other=0)

    block_ends = table + 2 * capacity
    block_id, last = tl.zeros([TOKENS], tl.int32), tl.zeros([TOKENS], tl.int32) + (count - 1)
    for _ in range(steps):  # the first block_id that block_ends behind the token
        middle = (block_id + last) // 2
        is_after = tl.load(block_ends + middle) > token
        block_id, last = tl.where(is_after, block_id, tl.minimum(middle + 1, last)), tl.where(is_after, middle, last)
    block_start = tl.load(block_ends + block_id - 1, mask=block_id > 0, other=0)
    row = head * (tl.load(block_ends + block_id) - block_start) + token - block_start

    from_keys = tl.multiple_of(tl.load(table + block_id).to(tl.pointer_type(keys.dtype.element_ty)), 16)
    from_values = tl.multiple_of(tl.load(table + capacity + block_id).to(tl.pointer_type(values.dtype.element_ty)), 16)
    to_keys = keys + (head * total + slots)[:, None] * dim + channels[None, :]
    to_values = values + (head * total + slots)[:, None] * v_dim + v_channels[None, :]
    inside = is_gathered[:, None] & (channels < dim)[None, :]
    tl.store(to_keys, tl.load(from_keys[:, None] + row[:, None] * dim + channels[None, :], mask=inside), mask=inside)
    inside = is_gathered[:, None] & (v_channels < v_dim)[None, :]
    value = tl.load(from_values[:, None] + row[:, None] * v_dim + v_channels[None, :], mask=inside)
    tl.store(to_values, value, mask=inside)
    if FRONT:
        row = head * first + slots
        inside = (slots < first)[:, None] & (channels < dim)[None, :]
        tl.store(to_keys, tl.load(front_keys + row[:, None] * dim + channels[None, :], mask=inside), mask=inside)
        inside = (slots < first)[:, None] & (v_channels < v_dim)[None, :]
        value = tl.load(front_values + row[:, None] * v_dim + v_channels[None, :], mask=inside)
        tl.store(to_values, value, mask=inside)
