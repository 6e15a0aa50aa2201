"""Products of rows of 8-bit floats (e4m3), in torch: every row has a float32 scale of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.kernels.torch import elementwise

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST_MAX = 448.0 * 2.0**-100  # the largest number of a row counts as this at least: a row of zeros has a scale, too


class Fp8Rows(NamedTuple):
    """numbers [..., dim] e4m3, scale [..., 1] float32: rows are numbers * scale. dtype: that they had before"""

    numbers: Tensor
    scale: Tensor
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def dequantized(self) -> Tensor:
        wide = torch.promote_types(self.dtype, torch.float32)
        return (self.numbers.to(wide) * self.scale).to(self.dtype)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """Divide each row by its largest number / 448, and round to the nearest e4m3. x [..., dim]"""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_MAX)
    numbers = (wide * (LARGEST / most)).clamp(-LARGEST, LARGEST).to(E4M3)  # above 464, torch's conversion gives NaN
    return Fp8Rows(numbers, most / LARGEST, x.dtype)


def rms_norm_quantized(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, rounds: bool = True) -> Fp8Rows:
    """quantize_rows of an RMS norm in the dtype of x. x [..., dim], weight [dim]"""
    return quantize_rows(elementwise.rms_norm(x, weight, eps, offset, rounds))


def gated_quantized(gate: Tensor, up: Tensor, activation: str) -> Fp8Rows:
    """quantize_rows of activation(gate) * up in their dtype. gate and up [..., dim]"""
    return quantize_rows(elementwise.gated(gate, up, activation))


def fp8_linear(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None = None, total: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in the dtype of x, summed in float32 at least.

    total: add the product to it in place. x [..., dim], weight [out, dim], bias [out], total [..., out]
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    product = x.numbers.to(wide) @ weight.numbers.to(wide).t()
    product = product * x.scale * weight.scale.t()
    if bias is not None:
        product = product + bias
    if total is None:
        return product.to(x.dtype)
    return total.copy_(total + product)
