"""A long prompt in little memory: what happens to each token by itself happens to a slice of them at a time.

Attention still sees the whole prompt, so nothing changes but the memory that norms and feed-forward parts take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.model.modules import beside_attention, instead

TOKENS = 8192  # enough for a GPU to be busy


@contextmanager
def sliced(model: PreTrainedModel, tokens: int = TOKENS) -> Iterator[None]:
    """Within, passes of more tokens than this are done in slices of so many."""
    with instead(beside_attention(model), lambda part: _by_slices(part, tokens)):
        yield


def _by_slices(part: nn.Module, tokens: int) -> Callable[..., Any]:
    whole = part.forward

    def forward(*given: Any, **named: Any) -> Any:
        if len(given) != 1 or named or given[0].ndim != 3 or given[0].shape[1] <= tokens:
            return whole(*given, **named)
        first, *rest = given[0].split(tokens, 1)
        done = whole(first)
        if not isinstance(done, Tensor) or done.shape != first.shape:
            return whole(*given)
        result = torch.empty(given[0].shape, dtype=done.dtype, device=done.device)
        result[:, :tokens] = done
        for number, piece in enumerate(rest, 1):
            result[:, number * tokens : (number + 1) * tokens] = whole(piece)
        return result

    return forward
