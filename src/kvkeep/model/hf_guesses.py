"""Assisted generation: which tokens of a forward pass are guesses, which transformers may take back (`crop`).

transformers asks for the logits of the last known token and of every guess behind it (`logits_to_keep`). A hook on the
model sees that number; attention does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from kvkeep.errors import UnsupportedModel


class GuessCounter:
    """Before each forward pass of a model: tells its cache how many of the pass's last tokens are guesses.

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
