"""Linear layers of one input (queries, keys, values; gate, up) as one matrix product.

Their weights are moved once so that they lie one after the other, and stay the modules' own parameters, as views: no
memory is taken twice, and a model that is saved, copied or changed in place is what it was. (A CUDA graph that somebody
captured of the model before would read memory that is free now.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Projections:
    """One matrix product where the weights lie one after the other; else, as after `model.to`, one each."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        for kind in ("weight", "bias"):
            _pack([getattr(layer, kind) for layer in layers])

    def __call__(self, x: Tensor) -> list[Tensor]:
        weight, bias = (_joined([getattr(layer, kind) for layer in self.layers]) for kind in ("weight", "bias"))
        if weight is None or (bias is None and self.layers[0].bias is not None):
            return [linear(x, layer.weight, layer.bias) for layer in self.layers]
        return list(linear(x, weight, bias).split(self.sizes, -1))


class SharedInput:
    """Projections called one after the other with the same tensor: the first call computes all of them."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.project, self.layers = Projections(layers), layers
        self.held: tuple[Tensor, list[Tensor | None]] | None = None  # an input, and what is still to be asked for

    def forward(self, index: int, x: Tensor) -> Tensor:
        held = self.held  # another thread may replace it at any time
        if held is None or held[0] is not x:
            held = self.held = x, self.project(x)
        part, held[1][index] = held[1][index], None
        if part is None:
            return linear(x, self.layers[index].weight, self.layers[index].bias)
        if not any(other is not None for other in held[1]):
            self.held = None
        if index == len(self.layers) - 1 and x.shape[-2] > 1:
            return part.contiguous()  # values may stay for long: they must not keep queries in memory
        return part


def is_plain(*layers: nn.Module) -> bool:
    """Whether nothing but nn.Linear's own code uses their weights: not quantized, sharded, adapted or offloaded."""
    if not all(type(layer) is nn.Linear and "forward" not in vars(layer) for layer in layers):
        return False
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    same = len({(w.device, w.dtype, w.shape[1]) for w in weights}) == 1 and len({b is None for b in biases}) == 1
    plain = all(type(w.data) is Tensor for w in (*weights, *biases) if w is not None)
    return same and plain and weights[0].is_floating_point() and weights[0].device.type != "meta"


def _pack(parts: list[nn.Parameter | None]) -> None:
    if parts[0] is not None and _joined(parts) is None:
        joined = torch.cat([part.data for part in parts])
        for part, view in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            part.data = view


def _joined(parts: list[nn.Parameter | None]) -> Tensor | None:
    """The tensor whose rows these are, in this order; None where there is none."""
    first, rows = parts[0], 0
    if first is None:
        return None
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.data_ptr() != end or not part.is_contiguous():
            return None
        end, rows = end + part.nbytes, rows + len(part)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
