"""The next token of every row, on the device: the likeliest, or one drawn, as each row wants it."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(
    logits: Tensor, temperature: Tensor, top_p: Tensor, source: torch.Generator, top_k: Tensor | None = None
) -> Tensor:
    """A row's next token is its likeliest where temperature is 0; else one of its top_k likeliest, 0: of all.

    logits [rows, vocabulary], temperature, top_p and top_k [rows] -> [rows]
    """
    heat = temperature.clamp_min(1e-5)[:, None]
    ordered, order = (logits.float() / heat).sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        beyond = torch.arange(logits.shape[1], device=logits.device) >= top_k[:, None]
        ordered = ordered.masked_fill(beyond & (top_k > 0)[:, None], float("-inf"))
    chances = ordered.softmax(-1)
    chances = chances.masked_fill(chances.cumsum(-1) - chances >= top_p[:, None], 0.0)
    noise = torch.empty_like(chances).exponential_(generator=source)
    drawn = order.gather(1, (chances / noise).argmax(-1, keepdim=True))[:, 0]
    return torch.where(temperature > 0, drawn, logits.argmax(-1))
