"""Parts that the Triton kernels share: blocks of vectors, exact products, and the steps of an online softmax.

Vectors are given by pointers to their first numbers, and are padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvkeep.kernels.triton.common import INTERPRETED

WIDE = tl.constexpr(INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(rows, valid, dim, DIM: tl.constexpr):
    """Load a vector at each pointer, zeros where it is not valid. -> [rows, DIM]"""
    channels = tl.arange(0, DIM)
    inside = valid[:, None] & (channels < dim)[None, :]
    return tl.load(rows[:, None] + channels[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(rows, vectors, valid, dim, DIM: tl.constexpr):
    """Store a vector at each valid pointer, in the dtype of the memory there."""
    channels = tl.arange(0, DIM)
    inside = valid[:, None] & (channels < dim)[None, :]
    tl.store(rows[:, None] + channels[None, :], vectors.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def copy_rows(source, target, valid, dim, DIM: tl.constexpr):
    """Copy the vector at each valid source pointer to its target pointer."""
    channels = tl.arange(0, DIM)
    inside = valid[:, None] & (channels < dim)[None, :]
    vectors = tl.load(source[:, None] + channels[None, :], mask=inside)
    tl.store(target[:, None] + channels[None, :], vectors.to(target.dtype.element_ty), mask=inside)


@triton.jit
def dot(a, b, WIDEN: tl.constexpr = WIDE):
    """a @ b, exact to float32 for all dtypes: a float32 operand beside a 16-bit one is split in three."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if a.dtype == b.dtype:
        return tl.dot(a, b, input_precision="tf32x3").to(tl.float32)  # float32 on tensor cores, without losing digits
    if a.dtype == tl.float32:
        high, middle, low = split_in_three(a, b.dtype)
        return (tl.dot(low, b) + tl.dot(middle, b) + tl.dot(high, b)).to(tl.float32)
    high, middle, low = split_in_three(b, a.dtype)
    return (tl.dot(a, low) + tl.dot(a, middle) + tl.dot(a, high)).to(tl.float32)


@triton.jit
def split_in_three(x, KIND: tl.constexpr):
    """float32 as a sum of three 16-bit numbers."""
    high = x.to(KIND)
    rest = x - high.to(tl.float32)
    middle = rest.to(KIND)
    return high, middle, (rest - middle.to(tl.float32)).to(KIND)


@triton.jit
def attention_logits(queries, keys, scale, softcap):
    """Scaled products of queries and keys, capped to softcap * tanh(logits / softcap) unless softcap is None."""
    logits = dot(queries, keys) * scale
    if softcap is not None:
        logits = softcapped(logits, softcap)
    return logits


@triton.jit
def half_logits(a, b, keys_a, keys_b, scale, softcap):
    """The same of queries and keys in two halves. a, b [queries, half], keys_a, keys_b [keys, half]"""
    logits = (dot(a, tl.trans(keys_a)) + dot(b, tl.trans(keys_b))) * scale
    if softcap is not None:
        logits = softcapped(logits, softcap)
    return logits


@triton.jit
def softcapped(logits, softcap):
    return softcap * (2 / (1 + tl.exp(-2 * logits / softcap)) - 1)


@triton.jit
def no_keys(QUERIES: tl.constexpr, DIM: tl.constexpr):
    """An online softmax before its first key: each query's largest logit, sum of exponentials, and output."""
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    output = tl.zeros([QUERIES, DIM], tl.float32)
    return row_max, row_sum, output


@triton.jit
def add_logits(logits, row_max, row_sum):
    """Add a block of logits. -> unnormalized probabilities, the factor for earlier sums, row_max, row_sum"""
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    probs = tl.exp(logits - new_max[:, None])
    rescale = tl.exp(row_max - new_max)
    return probs, rescale, new_max, row_sum * rescale + tl.sum(probs, 1)


@triton.jit
def add_keys(logits, values, valid, row_max, row_sum, output, dim, DIM: tl.constexpr):
    """Add a block of keys, given by their logits and pointers to their values. -> row_max, row_sum, output"""
    probs, rescale, row_max, row_sum = add_logits(logits, row_max, row_sum)
    v = load_rows(values, valid, dim, DIM)
    output = output * rescale[:, None] + dot(probs.to(v.dtype), v)
    return row_max, row_sum, output


@triton.jit
def sortable(value):
    """float32 as integers 0 … 2**32 - 1 in the same order; 0 and -0 are equal."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
