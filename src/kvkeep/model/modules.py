"""What a decoder layer has beside attention: norms and the feed-forward part, plain functions of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def attentions(model: PreTrainedModel) -> list[nn.Module]:
    return [part for layer in model.modules() for part in layer.children() if hasattr(part, "layer_idx")]


def beside_attention(model: PreTrainedModel) -> list[nn.Module]:
    """Of every layer; parts whose forward somebody has replaced already are left to them."""
    among = {id(part) for part in attentions(model)}
    layers = [layer for layer in model.modules() if any(id(part) in among for part in layer.children())]
    parts = [part for layer in layers for part in layer.children()]
    return [part for part in parts if id(part) not in among and "forward" not in vars(part)]


@contextmanager
def instead(parts: list[nn.Module], forward: Callable[[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    """Within, these parts do what `forward` makes of them."""
    made = [(part, forward(part)) for part in parts]
    for part, mine in made:
        part.forward = mine
    try:
        yield
    finally:
        for part in parts:
            del part.forward
