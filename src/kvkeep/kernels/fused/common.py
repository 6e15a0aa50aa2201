"""What the kernels share."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # its matrix products do not know bfloat16
AT_LEAST = 16  # rows of a matrix product


@triton.jit
def product(a, b, WIDEN: tl.constexpr):
    """a @ b, exact to float32 whatever the types: one that has more digits than the other is cut in three."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if a.dtype == b.dtype:
        return tl.dot(a, b, input_precision="tf32x3").to(tl.float32)  # of float32; on tensor cores all the same
    if a.dtype == tl.float32:
        high, middle, low = thirds(a, b.dtype)
        return (tl.dot(low, b) + tl.dot(middle, b) + tl.dot(high, b)).to(tl.float32)
    high, middle, low = thirds(b, a.dtype)
    return (tl.dot(a, low) + tl.dot(a, middle) + tl.dot(a, high)).to(tl.float32)


@triton.jit
def thirds(x, KIND: tl.constexpr):
    """float32 as a sum of three numbers of half its size."""
    high = x.to(KIND)
    rest = x - high.to(tl.float32)
    middle = rest.to(KIND)
    return high, middle, (rest - middle.to(tl.float32)).to(KIND)


@triton.jit
def capped(logits, softcap, CAPPED: tl.constexpr):
    """softcap * tanh(logits / softcap), where there is one."""
    if CAPPED:
        logits = softcap * (2 / (1 + tl.exp(-2 * logits / softcap)) - 1)
    return logits
