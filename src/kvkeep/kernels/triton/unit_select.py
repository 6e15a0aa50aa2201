"""The best of offloaded units, ascending: the lowest selected score is found digit by digit; then all units above it
are taken, and of its equals the later ones.

One program does so for a few thousand units of a head; of more, each program has a block, and they meet in histograms.
"""

import torch
import triton
import triton.language as tl

from kvkeep.kernels.triton.common import cdiv, kernel, pow2
from kvkeep.kernels.triton.tiles import sortable

COMPARED = 4096  # units per block of one program's selection
FEW = 2 * COMPARED  # units of a head that one program selects from
SPREAD = 1024  # units per program, of more
DIGITS = 4  # of 8 bits


def select_uniform_units(scores, size, quota):
    """Do what the reference does. scores [heads, units] float32"""
    heads, units = scores.shape
    count = min(units, quota // size)
    index = torch.empty(heads, count * size, dtype=torch.int64, device=scores.device)
    if count:
        _select_units[heads,](
            scores.contiguous(), index, None, None, units, count * size, count, 1, size, COMPARED, num_warps=16
        )
    return index


def select_counted(scores, units, counts, selected):
    """Do what the reference does."""
    rows, lists, most = scores.shape
    room = selected.shape[2]
    if most <= FEW:
        _select_units[rows * lists,](scores, selected, units, counts, most, room, 0, lists, 1, COMPARED, num_warps=16)
        return
    grid = blocks, lines = cdiv(most, SPREAD), rows * lists
    histograms = torch.zeros(lines, DIGITS, 256, dtype=torch.int32, device=scores.device)
    found = torch.empty(lines, blocks, 2, dtype=torch.int32, device=scores.device)  # above and equal to the lowest
    for digit in range(DIGITS):
        _count_digits[grid](scores, histograms, units, counts, most, lists, digit, DIGITS, SPREAD, num_warps=4)
    _count_selected[grid](scores, histograms, found, units, counts, most, lists, DIGITS, SPREAD, num_warps=4)
    _write_selected[grid](
        scores, histograms, found, selected, units, counts, most, room, lists, DIGITS, SPREAD, pow2(blocks), num_warps=4
    )


@kernel(do_not_specialize=["most", "room", "count"])
def _select_units(
    scores, index, units, counts, most, room, count, lists, size, COMPARED: tl.constexpr
):  # fmt: skip
    """Select `count` of each line's `most` units, or, where `units` and `counts` are given, as many as these say."""
    line, end = tl.program_id(0).to(tl.int64), most
    if units is not None:
        end, count = _sizes(units, counts, line // lists)
    if (end > 0) & (count > 0):
        _select(scores + line * most, index + line * room, end, count, size, COMPARED)


@triton.jit
def _sizes(units, counts, row):
    return tl.load(units + row).to(tl.int32), tl.load(counts + row).to(tl.int32)


@triton.jit
def _select(scores, index, units, count, size, COMPARED: tl.constexpr):
    last, left = tl.full([], 0, tl.int64), count + tl.full([], 0, tl.int32)
    num_equal = tl.full([], 0, tl.int32)
    for i in range(0, 4):  # `last`: the first digits of the highest rank that at least `count` units reach
        shift = 24 - 8 * i
        num = tl.zeros([256], tl.int32)
        for start in range(0, units, COMPARED):
            unit_ids = start + tl.arange(0, COMPARED)
            rank = _rank(scores + unit_ids, unit_ids < units)
            same = (rank >> (shift + 8)) == last
            num += tl.histogram(((rank >> shift) & 255).to(tl.int32), 256, mask=same)
        digit, num_equal, left = _next_digit(num, left)
        last = last * 256 + digit
    skip = num_equal - left  # of the equals, the first are not selected
    num_selected, num_equal_seen = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, units, COMPARED):
        unit_ids = start + tl.arange(0, COMPARED)
        rank = _rank(scores + unit_ids, unit_ids < units)
        is_selected = _is_selected(rank, last, num_equal_seen, skip)
        slot = num_selected + tl.cumsum(is_selected.to(tl.int32), 0) - 1
        for j in range(0, size):
            number = (unit_ids.to(tl.int64) * size + j).to(index.dtype.element_ty)
            tl.store(index + slot.to(tl.int64) * size + j, number, mask=is_selected)
        num_selected += tl.sum(is_selected.to(tl.int32), 0)
        num_equal_seen += tl.sum((rank == last).to(tl.int32), 0)


@triton.jit
def _is_selected(rank, last, num_equal_before, skip):
    """Whether a unit ranks above the last that is selected, or as high and behind the first `skip` of these."""
    same = (rank == last).to(tl.int32)
    return (rank > last) | ((same > 0) & (num_equal_before + tl.cumsum(same, 0) > skip))


@triton.jit
def _next_digit(num, left):
    """Find the highest digit that `left` units reach, how many have it, and how many of these are left."""
    reached = tl.sum(num, 0) - tl.cumsum(num, 0) + num
    digit = tl.sum((reached >= left).to(tl.int32), 0) - 1
    is_digit = tl.arange(0, 256) == digit
    num_equal = tl.sum(tl.where(is_digit, num, 0), 0)
    above = tl.sum(tl.where(is_digit, reached, 0), 0) - num_equal  # these are selected
    return digit, num_equal, left - above


@triton.jit
def _lowest(histograms, count, KNOWN: tl.constexpr):
    """-> the first `KNOWN` digits of the lowest selected rank, units that begin with them, and how many are selected"""
    digits = tl.arange(0, 256)
    last, left = tl.full([], 0, tl.int64), count + tl.full([], 0, tl.int32)
    num_equal = tl.full([], 0, tl.int32)
    for i in tl.static_range(KNOWN):
        num = tl.load(histograms + i * 256 + digits)
        digit, num_equal, left = _next_digit(num, left)
        last = last * 256 + digit
    return last, num_equal, left


@kernel(do_not_specialize=["most"])
def _count_digits(
    scores, histograms, units, counts, most, lists, DIGIT: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Count the next digit of the units of a block whose first digits are those of the lowest selected rank."""
    block, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end, count = _sizes(units, counts, line // lists)
    if (block * BLOCK < end) & (count > 0):
        mine = histograms + line * DIGITS * 256
        last, _, _ = _lowest(mine, count, DIGIT)
        unit_ids = block * BLOCK + tl.arange(0, BLOCK)
        rank = _rank(scores + line * most + unit_ids, unit_ids < end)
        same = (rank >> (32 - 8 * DIGIT)) == last
        num = tl.histogram(((rank >> (24 - 8 * DIGIT)) & 255).to(tl.int32), 256, mask=same)
        tl.atomic_add(mine + DIGIT * 256 + tl.arange(0, 256), num, mask=num > 0)


@kernel(do_not_specialize=["most"])
def _count_selected(
    scores, histograms, found, units, counts, most, lists, DIGITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    block, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end, count = _sizes(units, counts, line // lists)
    if (block * BLOCK < end) & (count > 0):
        last, _, _ = _lowest(histograms + line * DIGITS * 256, count, DIGITS)
        unit_ids = block * BLOCK + tl.arange(0, BLOCK)
        rank = _rank(scores + line * most + unit_ids, unit_ids < end)
        mine = found + (line * tl.num_programs(0) + block) * 2
        tl.store(mine, tl.sum((rank > last).to(tl.int32), 0))
        tl.store(mine + 1, tl.sum((rank == last).to(tl.int32), 0))


@kernel(do_not_specialize=["most", "room"])
def _write_selected(
    scores, histograms, found, selected, units, counts, most, room, lists, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    block, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end, count = _sizes(units, counts, line // lists)
    if (block * BLOCK < end) & (count > 0):
        last, num_equal, left = _lowest(histograms + line * DIGITS * 256, count, DIGITS)
        before = tl.arange(0, BLOCKS)
        others = found + (line * tl.num_programs(0) + before) * 2
        num_above = tl.sum(tl.load(others, mask=before < block, other=0), 0)
        num_equal_before = tl.sum(tl.load(others + 1, mask=before < block, other=0), 0)
        skip = num_equal - left  # of the equals, the first are not selected
        unit_ids = block * BLOCK + tl.arange(0, BLOCK)
        rank = _rank(scores + line * most + unit_ids, unit_ids < end)
        is_selected = _is_selected(rank, last, num_equal_before, skip)
        first = num_above + tl.maximum(num_equal_before - skip, 0)
        slot = first + tl.cumsum(is_selected.to(tl.int32), 0) - 1
        tl.store(selected + line * room + slot, unit_ids, mask=is_selected)


@triton.jit
def _rank(scores, valid):
    """float32 scores as numbers 0 … 2**32 - 1 in the same order, -1 where not valid."""
    return tl.where(valid, sortable(tl.load(scores, mask=valid, other=0.0)), -1)
