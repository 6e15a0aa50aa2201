"""Norms and MLPs of a long prompt in chunks, to save memory: they compute each token by itself.

Attention still sees the whole prompt, so nothing changes but the memory that norms and MLPs take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.model.hf_attention import attention_modules

CHUNK_TOKENS = 8192  # enough to keep a GPU busy


@contextmanager
def chunked_mlp(model: PreTrainedModel, tokens: int = CHUNK_TOKENS) -> Iterator[None]:
    """Within, norms and MLPs run on at most so many tokens at a time."""
    modules = _other_modules(model)
    for module in modules:
        module.forward = _chunked(module, tokens)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def long_prompt(model: PreTrainedModel, tokens: int) -> AbstractContextManager[None]:
    """The same for a forward pass of so many tokens, if they are many."""
    return chunked_mlp(model) if tokens > CHUNK_TOKENS else nullcontext()


def _other_modules(model: PreTrainedModel) -> list[nn.Module]:
    """List the modules of every layer, except attention and modules whose forward was replaced already."""
    attention = {id(module) for module in attention_modules(model)}
    layers = [layer for layer in model.modules() if any(id(module) in attention for module in layer.children())]
    modules = [module for layer in layers for module in layer.children()]
    return [module for module in modules if id(module) not in attention and "forward" not in vars(module)]


def _chunked(module: nn.Module, tokens: int) -> Callable[..., Any]:
    whole = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or args[0].ndim != 3 or args[0].shape[1] <= tokens:
            return whole(*args, **kwargs)
        first, *rest = args[0].split(tokens, 1)
        output = whole(first)
        if not isinstance(output, Tensor) or output.shape != first.shape:
            return whole(*args)
        result = torch.empty(args[0].shape, dtype=output.dtype, device=output.device)
        result[:, :tokens] = output
        for number, chunk in enumerate(rest, 1):
            result[:, number * tokens : (number + 1) * tokens] = whole(chunk)
        return result

    return forward
