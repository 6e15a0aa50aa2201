"""Rows of 8-bit floats out of norms, gated activations and plain rows: each reads its input once.

A program has whole rows: a row's scale comes from its largest number.
"""

import torch
import triton
import triton.language as tl

from kvkeep.kernels.torch.fp8 import E4M3, SMALLEST_MAX, Fp8Rows
from kvkeep.kernels.triton.common import INTERPRETED, cdiv, kernel, pow2
from kvkeep.kernels.triton.layer_ops import ACTIVATIONS, activated, normed
from kvkeep.kernels.triton.tiles import load_rows, store_rows

ROW_BLOCK = 1024  # numbers of a program, at least: short rows are quantized several at a time
ROUNDS_ITSELF = tl.constexpr(INTERPRETED)  # the interpreter's conversion rounds small numbers towards zero
SMALLEST = tl.constexpr(SMALLEST_MAX)


def quantize_rows(x):
    """Do what the reference does, for a last stride of 1"""
    rows, output, sizes, warps = _prepared(x)
    _quantize_rows[cdiv(len(rows), sizes[0]),](
        rows, output.numbers, output.scale, rows.stride(0), len(rows), x.shape[-1], *sizes, num_warps=warps
    )
    return output


def rms_norm_quantized(x, weight, eps, offset=0.0, rounds=True):
    """Do what the reference does, for x [..., dim] with last stride 1"""
    rows, output, sizes, warps = _prepared(x)
    _norm_rows[cdiv(len(rows), sizes[0]),](
        rows, weight, output.numbers, output.scale, rows.stride(0), len(rows), x.shape[-1], eps, offset, rounds,
        *sizes, num_warps=warps,
    )  # fmt: skip
    return output


def gated_quantized(gate, up, activation):
    """Do what the reference does, for last strides of 1"""
    gates, output, sizes, warps = _prepared(gate)
    ups = up.reshape(-1, up.shape[-1])
    _gate_rows[cdiv(len(gates), sizes[0]),](
        gates, ups, output.numbers, output.scale, gates.stride(0), ups.stride(0), len(gates), gate.shape[-1],
        ACTIVATIONS[activation], *sizes, num_warps=warps,
    )  # fmt: skip
    return output


def _prepared(x):
    """The rows of x, where they go, the size of a program's block [rows, dim], and its warps."""
    dim = x.shape[-1]
    numbers = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    sizes = max(1, ROW_BLOCK // pow2(dim)), pow2(dim)
    return x.reshape(-1, dim), Fp8Rows(numbers, scale, x.dtype), sizes, 4 if dim <= 2048 else 8 if dim <= 8192 else 16


@kernel(do_not_specialize=["count"])
def _quantize_rows(x, numbers, scale, stride, count, dim, BLOCK: tl.constexpr, DIM: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = load_rows(x + rows * stride, rows < count, dim, DIM).to(tl.float32)
    store_quantized(value, numbers, scale, rows, rows < count, dim, DIM)


@kernel(do_not_specialize=["count"])
def _norm_rows(
    x, weight, numbers, scale, stride, count, dim, eps, offset, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = load_rows(x + rows * stride, rows < count, dim, DIM)
    result = normed(value, weight, dim, eps, offset, ROUNDS, DIM).to(value.dtype).to(tl.float32)
    store_quantized(result, numbers, scale, rows, rows < count, dim, DIM)


@kernel(do_not_specialize=["count"])
def _gate_rows(
    gate, up, numbers, scale, gate_stride, up_stride, count, dim, KIND: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = load_rows(gate + rows * gate_stride, rows < count, dim, DIM)
    u = load_rows(up + rows * up_stride, rows < count, dim, DIM)
    result = activated(g, KIND).to(tl.float32) * u.to(tl.float32)
    store_quantized(result.to(g.dtype).to(tl.float32), numbers, scale, rows, rows < count, dim, DIM)


@triton.jit
def store_quantized(value, numbers, scale, rows, valid, dim, DIM: tl.constexpr):
    """Quantize rows of float32. value [rows, DIM], rows: their numbers"""
    most = tl.maximum(tl.max(tl.abs(value), 1), SMALLEST)
    most += tl.sum(tl.where(tl.abs(value) < float("inf"), 0.0, float("nan")), 1)  # the largest number may leave NaN out
    largest = tl.zeros_like(most) + 448.0
    result = value * tl.div_rn(largest, most)[:, None]
    result = tl.minimum(tl.maximum(result, -448.0), 448.0)
    if ROUNDS_ITSELF:
        result = round_to_e4m3(result)
    store_rows(numbers + rows * dim, result, valid, dim, DIM)
    tl.store(scale + rows, tl.div_rn(most, largest), mask=valid)


@triton.jit
def round_to_e4m3(x):
    """The nearest e4m3, as float32: adding 1.5 * 2**23 steps of its exponent leaves whole steps."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)  # below 2**-6, steps are alike
    steps = ((exponent + 20) << 23 | 1 << 22).to(tl.float32, bitcast=True)
    return (x + steps) - steps
