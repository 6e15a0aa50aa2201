"""Products of rows of 8-bit floats: of few rows by a kernel that reads the weights once, of many by torch's.

Few rows, as in decode, are bound by reading the weights: a program has few output channels and all rows, and its sum
needs no second pass.
"""

import torch
import triton.language as tl

from kvkeep.kernels.triton.common import INTERPRETED, cdiv, kernel, padded
from kvkeep.kernels.triton.tiles import load_rows

FEW_ROWS = 64
# Up to so many rows: output channels of a program, segments of the input channels, channels of a block, blocks ahead
TILES = {16: (32, 2, 128, 5), 32: (32, 2, 128, 5), 64: (64, 1, 256, 4)}  # the fastest on an H200


def fp8_linear(x, weight, bias=None, total=None):
    """Do what the reference does, for contiguous weights and sizes that 16 divides; a total has contiguous rows"""
    rows, outs = x.numbers.reshape(-1, x.numbers.shape[-1]).contiguous(), len(weight.numbers)
    output = x.scale.new_empty(*x.numbers.shape[:-1], outs, dtype=x.dtype) if total is None else total
    if len(rows):
        multiply = few_rows if len(rows) <= FEW_ROWS or INTERPRETED else many_rows
        multiply(rows, x.scale.reshape(-1, 1), weight, bias, output.view(-1, outs), total is not None)
    return output


def few_rows(rows, scale, weight, bias, output, adds, tiles=None):
    """rows [n, dim] e4m3, output [n, out]; adds: to what is there; tiles: one of TILES"""
    size, dim = min(padded(len(rows)), FEW_ROWS), rows.shape[1]
    outs, segments, channels, stages = tiles or TILES[size]
    segments = segments if dim % (16 * segments) == 0 else 1
    _few_rows[cdiv(output.shape[1], outs), cdiv(len(rows), size)](
        rows, scale, weight.numbers, weight.scale, bias, output, len(rows), output.stride(0), output.shape[1], dim,
        dim // segments, bias is not None, adds, size, outs, segments, channels, num_warps=4, num_stages=stages,
    )  # fmt: skip


def many_rows(rows, scale, weight, bias, output, adds):
    """The same by torch's product, whose result of scaled rows is bfloat16; others are scaled after it."""
    one, other = weight.numbers.t(), weight.scale.view(1, -1)
    if output.dtype == torch.bfloat16:
        product = torch._scaled_mm(rows, one, scale, other, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        unit = torch.ones((), device=rows.device)
        product = torch._scaled_mm(rows, one, unit, unit, out_dtype=torch.float32, use_fast_accum=True)
        product.mul_(scale).mul_(other)
    if bias is not None:
        product += bias
    if adds:
        output += product
    else:
        output.copy_(product)


@kernel(do_not_specialize=["count"])
def _few_rows(
    rows, row_scale, weight, weight_scale, bias, output, count, output_stride, outs, dim, segment, BIAS: tl.constexpr,
    ADDS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, SEGMENTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # Tensor cores take 64 rows of weights: a segment of the input channels counts as a row of its own, of weights and
    # of the input. Of the products, those of the same segment are summed.
    i, j = tl.arange(0, OUTS * SEGMENTS), tl.arange(0, ROWS * SEGMENTS)
    out, row = tl.program_id(0) * OUTS + i // SEGMENTS, tl.program_id(1) * ROWS + j // SEGMENTS
    out_at = weight + out.to(tl.int64) * dim + i % SEGMENTS * segment
    row_at = rows + row.to(tl.int64) * dim + j % SEGMENTS * segment
    total = tl.zeros([OUTS * SEGMENTS, ROWS * SEGMENTS], tl.float32)
    for start in range(0, segment, CHANNELS):
        w = load_rows(out_at + start, out < outs, segment - start, CHANNELS)
        x = load_rows(row_at + start, row < count, segment - start, CHANNELS)
        total = tl.dot(w, tl.trans(x), total)
    if SEGMENTS > 1:
        total = tl.where((i % SEGMENTS)[:, None] == (j % SEGMENTS)[None, :], total, 0.0)
        total = tl.sum(tl.sum(tl.reshape(total, [OUTS, SEGMENTS, ROWS, SEGMENTS]), 3), 1)
    out, row = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total *= tl.load(weight_scale + out, mask=out < outs, other=0.0)[:, None]
    total *= tl.load(row_scale + row, mask=row < count, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + out, mask=out < outs, other=0.0).to(tl.float32)[:, None]
    inside, where = (out < outs)[:, None] & (row < count)[None, :], output + row[None, :] * output_stride + out[:, None]
    if ADDS:
        total += tl.load(where, mask=inside, other=0.0).to(tl.float32)
    tl.store(where, total.to(output.dtype.element_ty), mask=inside)
