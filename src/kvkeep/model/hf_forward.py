"""A model's forward pass that asks our caches first: one may have a decode step captured in a CUDA graph.

And tells them after it which tokens it had: a method may want the text fed again. A pass that is longer than a cache
allows becomes several.

Of assisted generation, a hook tells a cache how many tokens are guesses, which transformers may take back (`crop`):
transformers asks for the logits of the last known token and of every guess behind it (`logits_to_keep`), and attention
does not see that number.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvkeep.errors import UnsupportedModel

PLAIN = {"use_cache": True, "return_dict": True, "output_attentions": False, "output_hidden_states": False}
KNOWN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "logits_to_keep", *PLAIN}


class InterceptedForward:
    """What stands in place of `model.forward`. A copy or a pickle of the model has its own forward again."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = weakref.ref(model)  # which holds this: it is freed as soon as nobody uses it
        update_wrapper(self, type(model).forward)
        self.__signature__ = inspect.signature(model.forward)

    @property
    def own(self) -> Callable[..., Any]:
        model = self.model()
        assert model is not None
        return MethodType(type(model).forward, model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get("past_key_values")
        if torch.compiler.is_compiling() or not hasattr(cache, "after_forward"):
            return self.own(*args, **kwargs)
        cache.before_forward()
        ids, positions = (*args, kwargs.get("input_ids"))[0], kwargs.get("position_ids")
        plain = isinstance(ids, Tensor) and is_plain(args, kwargs)
        step = None if torch.is_grad_enabled() else getattr(cache, "captured_step", None)
        if step and plain and ids.ndim == 2 and ids.shape[1] == 1:  # one token for each row
            logits = step(self.own, ids, positions)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        shown = kwargs.get("logits_to_keep")  # a tensor: places
        if plain and isinstance(shown, int | None) and ids.shape[1] > getattr(cache, "chunk_limit", ids.shape[1]):
            return self._forward_pieces(cache, kwargs | {"input_ids": ids}, shown or 0)
        output = self.own(*args, **kwargs)
        cache.after_forward(ids, positions)
        return output

    def _forward_pieces(self, cache: Any, kwargs: dict[str, Any], shown: int) -> Any:
        """Several forward passes in place of one that would attend beyond the context length.

        shown: tokens at the end whose logits are wanted; 0: all
        """
        tokens, logits, start = kwargs["input_ids"].shape[1], [], 0
        while start < tokens:
            end = min(tokens, start + cache.chunk_limit)
            end -= int(tokens - end == 1 < end - start)  # a last piece of one token would pass for a decode step
            part = piece(kwargs, start, end)
            output = self.own(**part)
            cache.after_forward(part["input_ids"], part.get("position_ids"))
            logits.append(output.logits)
            start = end
        output.logits = torch.cat(logits, 1)[:, -shown:]
        return output

    def __reduce__(self) -> Any:
        return getattr, (self.model(), "forward")  # while a copy is being made, that is its class's

    def __deepcopy__(self, memo: dict) -> Any:
        return memo[id(self.model())].forward


def piece(kwargs: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """The arguments of a forward pass of the tokens from start to end alone."""
    part, mask, tokens = dict(kwargs), kwargs.get("attention_mask"), kwargs["input_ids"].shape[1]
    for name in ("input_ids", "position_ids"):
        if part.get(name) is not None:
            part[name] = part[name][:, start:end]
    if mask is not None:
        part["attention_mask"] = mask[:, : mask.shape[1] - tokens + end]
    return part


def intercept(model: PreTrainedModel) -> bool:
    """Once. -> False: a model whose forward pass somebody else has replaced is left alone"""
    present = vars(model).get("forward")
    if present is None or getattr(present, "__func__", None) is type(model).forward:  # a copy of an intercepted one
        vars(model)["forward"] = InterceptedForward(model)
    return isinstance(vars(model)["forward"], InterceptedForward)


def is_plain(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Nothing is asked for but logits, by arguments that are known."""
    mask = kwargs.get("attention_mask")
    flat = mask is None or isinstance(mask, Tensor) and mask.ndim == 2
    usual = all(kwargs.get(name) in (None, value) for name, value in PLAIN.items())
    others = [name for name, value in kwargs.items() if value is not None and name not in KNOWN]
    return len(args) <= 1 and flat and usual and not others


class GuessCounter:
    """A hook before each forward pass of a model, which tells its cache how many of the last tokens are guesses.

    A copy or a pickle of it, with its model, counts nothing.
    """

    def __init__(self, cache: Any = None):
        self.cache: Callable[[], Any] = (lambda: None) if cache is None else weakref.ref(cache)

    @torch.compiler.disable
    def __call__(self, model: Any, args: Any, inputs: dict[str, Any]) -> None:
        cache, used, kept = self.cache(), inputs.get("past_key_values"), inputs.get("logits_to_keep")
        if cache is not None and id(cache) == id(used):
            cache.guesses = max(0, kept - 1) if isinstance(kept, int) else 0

    def __deepcopy__(self, memo: dict) -> GuessCounter:
        return GuessCounter()

    def __reduce__(self) -> Any:
        return GuessCounter, ()


def count_guesses(cache: Any) -> None:
    """Count the guesses of every forward pass through this cache, as long as it lives."""
    if not cache.model._supports_logits_to_keep():
        raise UnsupportedModel(
            f"{cache.name} has no logits_to_keep, which tells guesses from the prompt; leave assistant_model= and "
            "prompt_lookup_num_tokens= out."
        )
    hook = cache.model.register_forward_pre_hook(GuessCounter(cache), with_kwargs=True)
    weakref.finalize(cache, hook.remove)
