"""The next token of every row, on the device: the likeliest, or one drawn, as each row wants it."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, source: torch.Generator) -> Tensor:
    """logits [rows, vocabulary], temperature and top_p [rows] -> [rows]; a temperature of 0 takes the likeliest"""
    heat = temperature.clamp_min(1e-5)[:, None]
    chances, order = (logits.float() / heat).softmax(-1).sort(-1, descending=True)
    chances = chances.masked_fill(chances.cumsum(-1) - chances >= top_p[:, None], 0.0)
    noise = torch.empty_like(chances).exponential_(generator=source)
    drawn = order.gather(1, (chances / noise).argmax(-1, keepdim=True))[:, 0]
    return torch.where(temperature > 0, drawn, logits.argmax(-1))
