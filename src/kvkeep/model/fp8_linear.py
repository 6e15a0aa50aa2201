"""Linear layers whose weights and inputs are 8-bit floats (e4m3), for inference alone.

Every output channel of the weights and every token of the input has a float32 scale: its largest number becomes 448.
Inputs are quantized when they come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from kvkeep.kernels.dispatch import fp8_linear, quantize_rows
from kvkeep.kernels.torch.fp8 import Fp8Rows
from kvkeep.model.projections import Projections, joined, pack

MULTIPLE = 16  # of which both sizes of a product have to be on a GPU


class Fp8Linear(nn.Module):
    """Computes what an nn.Linear did. weight [out, in] e4m3, scale [out, 1] float32, whatever `model.to` is given"""

    weight: nn.Parameter
    scale: nn.Parameter

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        rows = quantize_rows(layer.weight.data)
        self.weight = nn.Parameter(rows.numbers, requires_grad=False)
        self.scale = nn.Parameter(rows.scale, requires_grad=False)
        self.bias = layer.bias

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.product(quantize_rows(x))

    def product(self, x: Fp8Rows, total: Tensor | None = None) -> Tensor:
        """Multiply rows that are quantized. total: as in fp8_linear"""
        return fp8_linear(x, Fp8Rows(self.weight.data, self.scale.data, x.dtype), self.bias, total)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights as numbers. [out, in]"""
        return Fp8Rows(self.weight.data, self.scale.data, dtype).dequantized()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        own = self.weight.data, self.scale.data
        super()._apply(fn, recurse)
        for part, value in zip((self.weight, self.scale), own, strict=True):
            if part.dtype != value.dtype:
                part.data = value.to(part.device)
        return self


class Fp8Projections(Projections):
    """Those of one input in one matrix product, as `Projections`."""

    layers: list[Fp8Linear]  # type: ignore[assignment]

    def __init__(self, layers: list[Fp8Linear]) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        for parts in self._parts():
            pack(parts)

    def __call__(self, x: Tensor) -> list[Tensor]:
        return self.of_rows(quantize_rows(x))

    def of_rows(self, x: Fp8Rows) -> list[Tensor]:
        """Multiply rows that are quantized."""
        weight, scale, bias = map(joined, self._parts())
        if weight is None or scale is None or (bias is None and self.layers[0].bias is not None):
            return [layer.product(x) for layer in self.layers]
        return list(fp8_linear(x, Fp8Rows(weight, scale, x.dtype), bias).split(self.sizes, -1))

    def one(self, index: int, x: Tensor) -> Tensor:
        return self.layers[index].product(quantize_rows(x))

    def _parts(self) -> list[list[Tensor]]:
        """Weights, scales, and biases where layers have them."""
        biases: list[Tensor] = [layer.bias for layer in self.layers if layer.bias is not None]
        return [[layer.weight for layer in self.layers], [layer.scale for layer in self.layers], biases]


def is_fp8(layer: nn.Module | None) -> TypeGuard[Fp8Linear]:
    """Whether nothing but its own code uses its weights."""
    return type(layer) is Fp8Linear and "forward" not in vars(layer)


def can_join_fp8(layers: list[nn.Module]) -> TypeGuard[list[Fp8Linear]]:
    found = [layer for layer in layers if is_fp8(layer)]
    kinds = {(each.weight.device, each.in_features, each.bias is None) for each in found}
    return len(found) == len(layers) and len(kinds) == 1
