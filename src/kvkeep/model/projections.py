"""Linear layers of one input (queries, keys, values; gate, up) as one matrix product.

Their weights are moved once so that they lie one after the other, and stay the modules' own parameters, as views: no
memory is taken twice, and a model that is saved, copied or changed in place is what it was. (A CUDA graph that somebody
captured of the model before would read memory that is free now.) Also: what a layer's output projection is, for methods
that weigh values by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident, local
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from kvkeep.errors import UnsupportedModel
from kvkeep.model.hf_attention import attention_modules, text_config
from kvkeep.model.hf_cache import execution_device, key_shape, query_heads


class Projections:
    """One matrix product where the weights lie one after the other; else, as after `model.to`, one each."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        for parts in _parameters(layers):
            pack(parts)

    def __call__(self, x: Tensor) -> list[Tensor]:
        weight, bias = map(joined, _parameters(self.layers))
        if weight is None or (bias is None and self.layers[0].bias is not None):
            return [self.one(index, x) for index in range(len(self.layers))]
        return list(linear(x, weight, bias).split(self.sizes, -1))

    def one(self, index: int, x: Tensor) -> Tensor:
        """That of one layer alone."""
        return linear(x, self.layers[index].weight, self.layers[index].bias)


class SharedInput:
    """Projections called one after the other with the same tensor: the first call computes all of them."""

    def __init__(self, project: Projections) -> None:
        self.project = project
        self.held: tuple[Tensor, list[Tensor | None]] | None = None  # an input, and what is still to be asked for
        self.given = local()

    @contextmanager
    def computed(self, x: Tensor, parts: list[Tensor]) -> Iterator[None]:
        """Within, and for this thread, these are the projections of x, asked for once each."""
        self.given.held = x, [*parts]
        try:
            yield
        finally:
            self.given.held = None

    def forward(self, index: int, x: Tensor) -> Tensor:
        given = getattr(self.given, "held", None)
        if given is not None and given[0] is x:
            part, given[1][index] = given[1][index], None
            return self._last_contiguous(index, part)
        held = self.held  # another thread may replace it at any time
        if held is None or held[0] is not x:
            held = self.held = (x, [*self.project(x)])
        part, held[1][index] = held[1][index], None
        if part is None:
            return self.project.one(index, x)
        if not any(other is not None for other in held[1]):
            self.held = None
        return self._last_contiguous(index, part)

    def _last_contiguous(self, index: int, part: Tensor) -> Tensor:
        """Values may stay for long: they must not keep queries in memory."""
        is_last = index == len(self.project.layers) - 1
        return part.contiguous() if is_last and part.shape[-2] > 1 else part


def can_join(layers: list[nn.Module]) -> TypeGuard[list[nn.Linear]]:
    plain = [layer for layer in layers if is_plain(layer)]
    kinds = {(each.weight.device, each.weight.dtype, each.weight.shape[1], each.bias is None) for each in plain}
    return len(plain) == len(layers) and len(kinds) == 1


def is_plain(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether nothing but nn.Linear's own code uses its weights: not quantized, sharded, adapted or offloaded."""
    return has_plain_weight(layer) and "forward" not in vars(layer)


def has_plain_weight(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether its weights are numbers that are there."""
    if type(layer) is not nn.Linear:
        return False
    plain = all(type(each.data) is Tensor for each in (layer.weight, layer.bias) if each is not None)
    return plain and layer.weight.is_floating_point() and layer.weight.device.type != "meta"


def _parameters(layers: list[nn.Linear]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights, and biases where layers have them."""
    return [layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]


def pack(parts: list[Tensor]) -> None:
    """Move tensors of one kind so that they lie one after the other."""
    if parts and joined(parts) is None:
        whole = parts[0].data.new_empty(sum(map(len, parts)), *parts[0].shape[1:])
        for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = view.copy_(part.data)


def joined(parts: list[Tensor]) -> Tensor | None:
    """The tensor whose rows these are, in this order; None where there is none."""
    if not parts:
        return None
    first, rows = parts[0], 0
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.data_ptr() != end or not part.is_contiguous():
            return None
        end, rows = end + part.nbytes, rows + len(part)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


NAMES = "o_proj", "out_proj", "dense", "c_proj", "wo"  # of transformers' models


@torch.no_grad()
def output_weight(model: PreTrainedModel, index: int) -> Tensor:
    """The output projection of each query head of a layer. [heads, hidden, dim]"""
    projection = _projection(model, index)
    if has_plain_weight(projection):
        weight = projection.weight
    elif callable(dequantized := getattr(projection, "dequantized", None)):  # in 8-bit floats
        weight = dequantized(model.dtype)
    else:  # quantized, adapted or offloaded, it is linear: its value of each unit vector
        size = getattr(projection, "in_features", text_config(model).num_attention_heads * key_shape(model)[1])
        units = torch.eye(size, dtype=model.dtype, device=execution_device(projection))
        weight = (projection(units) - projection(torch.zeros_like(units[:1]))).t()
    return weight.unflatten(1, (query_heads(model), -1)).transpose(0, 1)


def _projection(model: PreTrainedModel, index: int) -> nn.Module:
    for module in attention_modules(model):
        if module.layer_idx == index:
            for name in NAMES:
                if isinstance(found := getattr(module, name, None), nn.Module):
                    return found
    raise UnsupportedModel(
        f"the output projection of layer {index} of {type(model).__name__} was not found (known names: "
        f"{', '.join(NAMES)}); use a method that does without, such as 'kvzip' or 'snapkv'."
    )


@contextmanager
def hidden_norms(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Record, within, norms of the hidden states that this thread gave these layers last. layer -> [rows, q]"""
    found: dict[int, Tensor] = {}
    thread = get_ident()

    def record(index: int) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if get_ident() == thread:
                hidden = args[0] if args else kwargs["hidden_states"]
                found[index] = hidden.float().norm(dim=-1)

        return hook

    with ExitStack() as stack:
        for layer in model.modules():
            for index in {int(getattr(child, "layer_idx", -1)) for child in layer.children()} & set(layers):
                stack.enter_context(layer.register_forward_pre_hook(record(index), with_kwargs=True))
        yield found
