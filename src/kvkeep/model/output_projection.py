"""What a layer's attention adds to the hidden states: the weight it is projected with, and what it is added to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.errors import UnsupportedModel
from kvkeep.model.hf_cache import execution_device, query_heads
from kvkeep.model.modules import attention_modules
from kvkeep.model.projections import has_plain_weight

NAMES = "o_proj", "out_proj", "dense", "c_proj", "wo"  # of transformers' models


@torch.no_grad()
def output_weight(model: PreTrainedModel, index: int) -> Tensor:
    """The output projection of each query head of a layer. [heads, hidden, dim]"""
    projection = _projection(model, index)
    if has_plain_weight(projection):
        weight = projection.weight
    else:  # quantized, adapted or offloaded, it is linear: its value of each unit vector
        device, size = execution_device(projection), _input_size(model, projection)
        units = torch.eye(size, dtype=model.dtype, device=device)
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


def _input_size(model: PreTrainedModel, projection: Any) -> int:
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(projection, "in_features", heads * head_dim)


@contextmanager
def hidden_norms(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Within, norms of the hidden states that this thread gave these layers last. layer -> [rows, q]"""
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
