"""The options of `Engine.generate`, and sampling the next token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import BadParameter
from kvkeep.registry import did_you_mean

OTHER_NAMES = {  # names other libraries use
    "do_sample": " Leave it out: an answer is sampled where temperature is above 0.",
    "max_length": " max_new_tokens= counts the answer alone.",
    "max_tokens": " It is called max_new_tokens= here.",
    "rows": " It is for a list of prompts.",
    "progress": " A list of prompts is answered without it.",
}


def check_count(name: str, value: Any, least: int, why: str) -> None:
    """Refuse what is not a whole number of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise BadParameter(f"{name}={value!r}: {why}.")


def check_sampling(temperature: float, top_p: float, top_k: int = 0) -> None:
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
            raise BadParameter(f"{name}={value!r} is not a finite number.")
    if not (temperature >= 0 and 0 < top_p <= 1):
        raise BadParameter(f"temperature={temperature}, top_p={top_p}: use 0 or more, and a number in (0, 1].")
    check_count("top_k", top_k, 0, "use a whole number of tokens to sample from, or 0 for all of them")


def check_seed(seed: int) -> None:
    check_count("seed", seed, 0, "use a whole number, 0 or more")
    if seed >= 2**63:
        raise BadParameter(f"seed={seed}: use a whole number below 2**63.")


def check_new_tokens(max_new_tokens: int) -> None:
    check_count("max_new_tokens", max_new_tokens, 1, "an answer has at least one; give a whole number")


@dataclass(frozen=True)
class Generation:
    """The checked options of one answer."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_new_tokens(self.max_new_tokens)
        check_sampling(self.temperature, self.top_p, self.top_k)
        check_seed(self.seed)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Generation:
        """From keyword arguments; unknown ones are refused by name."""
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                hint = OTHER_NAMES.get(name) or did_you_mean(name, known)
                raise BadParameter(f"'{name}' is not an option of an answer; these are: {', '.join(known)}.{hint}")
        return cls(**options)

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.temperature, self.top_p, self.seed, self.top_k)


@dataclass
class Sampler:
    """Samples one sequence on the host: the likeliest token, or one of the top_k likeliest that make up top_p.

    As in transformers and vLLM, top_p is of the probability that top_k leaves.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0  # 0: all
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p, self.top_k)
        check_seed(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, logits: Tensor) -> int:
        """logits [vocabulary]"""
        if not self.temperature:
            return int(logits.argmax())
        logits, tokens = (logits.float().cpu() / self.temperature).sort(descending=True, stable=True)
        probs = logits[: self.top_k or None].softmax(-1)
        probs[probs.cumsum(0) - probs >= self.top_p] = 0.0
        return int(tokens[torch.multinomial(probs, 1, generator=self.generator)])


def sample(
    logits: Tensor, temperature: Tensor, top_p: Tensor, generator: torch.Generator, top_k: Tensor | None = None
) -> Tensor:
    """Samples every row on its device: the likeliest token where temperature is 0; else one of top_k, 0: of all.

    logits [rows, vocabulary], temperature, top_p and top_k [rows] -> [rows]
    """
    scaled = logits.float() / temperature.clamp_min(1e-5)[:, None]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        beyond = torch.arange(logits.shape[1], device=logits.device) >= top_k[:, None]
        ordered = ordered.masked_fill(beyond & (top_k > 0)[:, None], float("-inf"))
    probs = ordered.softmax(-1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p[:, None], 0.0)
    noise = torch.empty_like(probs).exponential_(generator=generator)
    sampled = order.gather(1, (probs / noise).argmax(-1, keepdim=True))[:, 0]
    return torch.where(temperature > 0, sampled, logits.argmax(-1))
