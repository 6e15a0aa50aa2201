"""Keys and values that a GPU writes to and gathers from pinned host memory by itself, without copies by the CPU.

Host blocks lie anywhere in pinned memory. A device table has, per block, the addresses of its keys and values and the
number of tokens up to its end: [3, capacity] int64, with as many columns filled as there are blocks.

`fetch_units` brings selected units to slots on the device, for all rows of a pool, unless they are there. Its table
tells, per row and block, where token 0 of the row would lie if the block went back to it, for keys and values, how far
apart its heads are, in tokens, and the number of tokens up to its end: [rows, 5, capacity] int64. A block may also lie
on the device. The host need not know what is selected, so a fetch can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.kernels.triton.common import cdiv, kernel, pow2
from kvkeep.kernels.triton.tiles import copy_rows

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
        index, table, *(front or (None, None)), keys, values, table.shape[1], count, count.bit_length(), total - k,
        total, k if index.shape[0] > 1 else 0, dim, v_dim, TOKENS, pow2(dim), pow2(v_dim), num_warps=4,
    )  # fmt: skip


@kernel(do_not_specialize=["capacity", "slot", "end", "n"])
def _put(
    keys, values, home_keys, home_values, table, capacity, slot, end, n, key_head, key_step, value_head, value_step,
    dim, v_dim, TOKENS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    valid, rows = tokens < n, head * n + tokens
    home_keys, home_values = home_keys.to(tl.int64), home_values.to(tl.int64)  # Triton passes a low address as int32
    to_keys = tl.multiple_of(home_keys.to(tl.pointer_type(keys.dtype.element_ty)), 16)
    to_values = tl.multiple_of(home_values.to(tl.pointer_type(values.dtype.element_ty)), 16)
    copy_rows(keys + head * key_head + tokens * key_step, to_keys + rows * dim, valid, dim, DIM)
    copy_rows(values + head * value_head + tokens * value_step, to_values + rows * v_dim, valid, v_dim, V_DIM)
    if (head == 0) & (block == 0):
        tl.store(table + slot, home_keys)
        tl.store(table + capacity + slot, home_values)
        tl.store(table + 2 * capacity + slot, end)


@kernel(do_not_specialize=["capacity", "count", "steps", "first", "total", "index_stride"])
def _gather(
    index, table, front_keys, front_values, keys, values, capacity, count, steps, first, total, index_stride, dim,
    v_dim, TOKENS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    slots = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_gathered = (slots >= first) & (slots < total)
    token = tl.load(index + head * index_stride + slots - first, mask=is_gathered, other=0)
    block_ends = table + 2 * capacity
    block = _find_block(block_ends, token, count, steps, is_gathered)
    block_start = tl.load(block_ends + block - 1, mask=block > 0, other=0)
    row = head * (tl.load(block_ends + block) - block_start) + token - block_start

    from_keys = tl.multiple_of(tl.load(table + block).to(tl.pointer_type(keys.dtype.element_ty)), 16)
    from_values = tl.multiple_of(tl.load(table + capacity + block).to(tl.pointer_type(values.dtype.element_ty)), 16)
    to_keys, to_values = keys + (head * total + slots) * dim, values + (head * total + slots) * v_dim
    copy_rows(from_keys + row * dim, to_keys, is_gathered, dim, DIM)
    copy_rows(from_values + row * v_dim, to_values, is_gathered, v_dim, V_DIM)
    if front_keys is not None:
        row, is_front = head * first + slots, slots < first
        copy_rows(front_keys + row * dim, to_keys, is_front, dim, DIM)
        copy_rows(front_values + row * v_dim, to_values, is_front, v_dim, V_DIM)


@triton.jit
def _find_block(block_ends, token, count, steps, valid):
    """The first of `count` blocks that ends behind each token; steps: enough to halve the blocks down to one"""
    block, last = tl.zeros_like(token).to(tl.int32), tl.zeros_like(token).to(tl.int32) + (count - 1)
    for _ in range(steps):
        middle = (block + last) // 2
        is_after = tl.load(block_ends + middle, mask=valid, other=0) > token
        block, last = tl.where(is_after, block, tl.minimum(middle + 1, last)), tl.where(is_after, middle, last)
    return block


COMPARED = 1024  # units per block


def fetch_units(
    selected: Tensor,
    counts: Tensor,
    now: Tensor,
    slot_of: Tensor,
    unit_of: Tensor,
    used: Tensor,
    hand: Tensor,
    slots: Tensor,
    table: Tensor,
    blocks: Tensor,
    pair: tuple[Tensor, Tensor],
    sinks: int,
    unit: int,
) -> None:
    """Bring units to slots, over those unused for longest, about.

    selected, slots [rows, lists, most] int32: the units, ascending, of which the first counts [rows] matter, and where
    they are afterwards; slot_of [rows, lists, units], unit_of, used [rows, lists, slots], hand [rows, lists]: what is
    where (-1: nowhere, none), when it was used last, and the slot to be filled next; now [rows]: larger in every step
    blocks [rows]: of the table; pair: keys and values [rows, kv_heads, sinks + slots * unit, dim]; all contiguous
    """
    keys, values = pair
    (rows, lists, most), (kv_heads, size, dim), v_dim = selected.shape, keys.shape[1:], values.shape[-1]
    fetched = torch.empty_like(selected)  # units, -1 where they are there already
    free = torch.empty_like(unit_of)
    _assign_slots[rows * lists,](
        selected, counts, now, slot_of, unit_of, used, hand, slots, fetched, free, lists, most, slot_of.shape[2],
        unit_of.shape[2], COMPARED, num_warps=4,
    )  # fmt: skip
    _copy_units[rows * kv_heads, cdiv(most * unit, TOKENS)](
        fetched, slots, counts, table, blocks, keys, values, kv_heads, most, table.shape[2],
        table.shape[2].bit_length(), size, sinks, unit, dim, v_dim, lists > 1, dim * keys.element_size() % 16 == 0,
        v_dim * values.element_size() % 16 == 0, TOKENS, pow2(dim), pow2(v_dim), num_warps=4,
    )  # fmt: skip


@kernel(do_not_specialize=["most", "units", "size"])
def _assign_slots(
    selected, counts, now, slot_of, unit_of, used, hand, slots, fetched, free, lists, most, units, size,
    COMPARED: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    count, step = tl.load(counts + line // lists).to(tl.int32), tl.load(now + line // lists).to(tl.int32)
    selected, slots, fetched = selected + line * most, slots + line * most, fetched + line * most
    slot_of, unit_of, used, free = slot_of + line * units, unit_of + line * size, used + line * size, free + line * size
    num_missing = tl.full([], 0, tl.int32)
    for start in range(0, count, COMPARED):  # those that are there are used now
        place = start + tl.arange(0, COMPARED)
        number = tl.load(selected + place, mask=place < count, other=0)
        slot = tl.load(slot_of + number, mask=place < count, other=0)
        tl.store(slots + place, slot, mask=place < count)
        tl.store(fetched + place, tl.where(slot < 0, number, -1), mask=place < count)
        tl.store(used + slot, step, mask=(place < count) & (slot >= 0))
        num_missing += tl.sum((slot < 0).to(tl.int32), 0)
    if num_missing > 0:
        tl.debug_barrier()
        first, num_free = tl.load(hand + line), tl.full([], 0, tl.int32)
        for start in range(0, size, COMPARED):  # slots not used now, from the hand on
            place = start + tl.arange(0, COMPARED)
            slot = (first + place) % size
            is_free = (place < size) & (tl.load(used + slot, mask=place < size, other=0) != step)
            tl.store(free + num_free + tl.cumsum(is_free.to(tl.int32), 0) - 1, slot, mask=is_free)
            num_free += tl.sum(is_free.to(tl.int32), 0)
        tl.debug_barrier()
        filled = tl.full([], 0, tl.int32)
        for start in range(0, count, COMPARED):
            place = start + tl.arange(0, COMPARED)
            number = tl.load(fetched + place, mask=place < count, other=-1)
            missing = number >= 0
            slot = tl.load(free + filled + tl.cumsum(missing.to(tl.int32), 0) - 1, mask=missing, other=0)
            before = tl.load(unit_of + slot, mask=missing, other=-1)
            tl.store(slot_of + before, -1, mask=missing & (before >= 0))
            tl.store(slot_of + number, slot, mask=missing)
            tl.store(unit_of + slot, number, mask=missing)
            tl.store(used + slot, step, mask=missing)
            tl.store(slots + place, slot, mask=missing)
            filled += tl.sum(missing.to(tl.int32), 0)
        tl.store(hand + line, (tl.load(free + filled - 1) + 1) % size)


@kernel(do_not_specialize=["most", "capacity", "steps", "size"])
def _copy_units(
    fetched, slots, counts, table, blocks, keys, values, kv_heads, most, capacity, steps, size, sinks, unit, dim, v_dim,
    EACH_HEAD: tl.constexpr, ALIGNED: tl.constexpr, V_ALIGNED: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr,
):  # fmt: skip
    segment, tokens = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row, head = segment // kv_heads, segment % kv_heads
    line = row
    if EACH_HEAD:
        line = segment
    valid = tokens < tl.load(counts + row).to(tl.int32) * unit
    number = tl.load(fetched + line * most + tokens // unit, mask=valid, other=-1)
    if tl.max(number, 0) >= 0:
        valid = number >= 0
        token = number.to(tl.int64) * unit + tokens % unit
        slot = tl.load(slots + line * most + tokens // unit, mask=valid, other=0)
        table += row * 5 * capacity
        block = _find_block(table + 4 * capacity, token, tl.load(blocks + row).to(tl.int32), steps, valid)
        from_keys = tl.load(table + block, mask=valid, other=0).to(tl.pointer_type(keys.dtype.element_ty))
        from_values = tl.load(table + capacity + block, mask=valid, other=0)
        from_values = from_values.to(tl.pointer_type(values.dtype.element_ty))
        if ALIGNED:
            from_keys = tl.multiple_of(from_keys, 16)
        if V_ALIGNED:
            from_values = tl.multiple_of(from_values, 16)
        key_row = head * tl.load(table + 2 * capacity + block, mask=valid, other=0) + token
        value_row = head * tl.load(table + 3 * capacity + block, mask=valid, other=0) + token
        target = segment * size + sinks + slot * unit + tokens % unit
        copy_rows(from_keys + key_row * dim, keys + target * dim, valid, dim, DIM)
        copy_rows(from_values + value_row * v_dim, values + target * v_dim, valid, v_dim, V_DIM)
