"""A model's linear layers changed into 8-bit floats, in place: what is changed, and what is refused before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.errors import BadParameter, UnsupportedModel
from kvkeep.model.fp8_linear import MULTIPLE, Fp8Linear
from kvkeep.model.fused import forget
from kvkeep.model.head_shards import head_shards
from kvkeep.model.hf_attention import attention_modules
from kvkeep.model.projections import is_plain

WEIGHTS = None, "fp8", "fp8+head"
CAPABILITY = 8, 9  # of the first GPUs that multiply e4m3
Place = tuple[nn.Module, str, nn.Module]  # a module, and the name and value of one of its children


def check_weights(weights: Any) -> None:
    if weights not in WEIGHTS:
        raise BadParameter(f"weights={weights!r}: use one of {', '.join(map(repr, WEIGHTS))}.")


def use_weights(model: Any, weights: str | None) -> None:
    """Change the linear layers of the decoder layers, and with "fp8+head" the LM head; None changes nothing.

    The numbers they had are gone, and their memory is free. Everything is checked before the first one is changed;
    layers that are changed already stay.
    """
    if weights is None:
        return
    _check_model(model)
    places = _linear_layers(model) + (_head(model) if weights == "fp8+head" else [])
    _check_layers(model, places)
    forget(model)  # what is prepared for the layers before
    for parent, name, layer in places:
        if isinstance(layer, nn.Linear) and _fits(layer):
            setattr(parent, name, Fp8Linear(layer))
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):  # compiled, say
        raise UnsupportedModel(f"weights='fp8' changes a model's layers, and a {name} is not transformers' own model.")
    if head_shards(model):
        raise UnsupportedModel("weights='fp8' is for one process; this model is split over several. Leave it out.")
    if model.training:
        raise UnsupportedModel(f"weights='fp8' cannot be trained, and this {name} is in training; call model.eval().")
    kind = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    if kind or getattr(model, "hf_quantizer", None):
        raise UnsupportedModel(
            f"the weights of this {name} are quantized already ({kind or 'by transformers'}); leave weights='fp8' out, "
            "or load the checkpoint that was not quantized."
        )
    for device in {each.device for each in model.parameters()}:
        _check_device(device)


def _check_device(device: torch.device) -> None:
    if device.type == "cpu":
        return
    has_fp8 = device.type == "cuda" and torch.version.hip is None
    if not has_fp8 or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise BadParameter(
            f"weights='fp8': this model is on {device}; fp8 needs an NVIDIA GPU of compute capability 8.9 or newer, "
            "or a CPU; leave it out."
        )


def _linear_layers(model: PreTrainedModel) -> list[Place]:
    """All that have a weight matrix of their own, in the layers that have attention."""
    attention = {id(module) for module in attention_modules(model)}
    layers = [layer for layer in model.modules() if any(id(child) in attention for child in layer.children())]
    return list({id(place[2]): place for layer in layers for place in _linear(layer)}.values())


def _linear(layer: nn.Module) -> Iterator[Place]:
    for parent in layer.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | Fp8Linear) or hasattr(child, "base_layer"):  # an adapter's
                yield parent, name, child


def _head(model: PreTrainedModel) -> list[Place]:
    head = model.get_output_embeddings()
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if isinstance(head, nn.Linear) and head.weight is weight:
        raise UnsupportedModel(
            f"weights='fp8+head': the LM head of this {type(model).__name__} has the weights of its input embeddings; "
            "use weights='fp8', which leaves the head as it is."
        )
    return [(parent, name, each) for parent, name, each in _children(model) if each is head]


def _children(model: nn.Module) -> Iterator[Place]:
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def _check_layers(model: PreTrainedModel, places: list[Place]) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    for _, _, layer in places:
        if not isinstance(layer, Fp8Linear) and not is_plain(layer):
            raise UnsupportedModel(
                f"weights='fp8': {names[id(layer)]} is no plain nn.Linear but a {_kind(layer)}, adapted, quantized, "
                "split, offloaded or with a forward of its own; leave weights='fp8' out, or merge or remove that first."
            )
    if not any(isinstance(layer, Fp8Linear) or _fits(layer) for _, _, layer in places):
        raise UnsupportedModel(
            f"weights='fp8': no linear layer of this {type(model).__name__} has sizes that {MULTIPLE} divides; leave "
            "weights='fp8' out."
        )


def _fits(layer: nn.Module) -> bool:
    weight: Tensor | None = getattr(layer, "weight", None)
    return weight is not None and not any(size % MULTIPLE for size in weight.shape)


def _kind(module: nn.Module) -> str:
    return type(module).__name__
