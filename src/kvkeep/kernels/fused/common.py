"""What the kernels share."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # its matrix products do not know bfloat16
AT_LEAST = 16  # rows of a matrix product


@triton.jit
def product(a, b, WIDEN: tl.constexpr):
    """a @ b in float32."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="tf32x3").to(tl.float32)  # of float32; as exact, but on tensor cores


@triton.jit
def capped(logits, softcap, CAPPED: tl.constexpr):
    """softcap * tanh(logits / softcap), where there is one."""
    if CAPPED:
        logits = softcap * (2 / (1 + tl.exp(-2 * logits / softcap)) - 1)
    return logits
