"""Modules of a decoder layer: attention, and those that compute each token by itself (norms, MLP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [module for layer in model.modules() for module in layer.children() if hasattr(module, "layer_idx")]


def other_modules(model: PreTrainedModel) -> list[nn.Module]:
    """List the modules of every layer, except attention and modules whose forward was replaced already."""
    attention = {id(module) for module in attention_modules(model)}
    layers = [layer for layer in model.modules() if any(id(module) in attention for module in layer.children())]
    modules = [module for layer in layers for module in layer.children()]
    return [module for module in modules if id(module) not in attention and "forward" not in vars(module)]


@contextmanager
def replace_forward(modules: list[nn.Module], forward: Callable[[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    """Within, these modules have the forward function that `forward` returns for them."""
    replaced = [(module, forward(module)) for module in modules]
    for module, function in replaced:
        module.forward = function
    try:
        yield
    finally:
        for module in modules:
            del module.forward
