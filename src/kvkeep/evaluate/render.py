"""From a sample to the ids a model reads: what may be compressed, and what comes after.

Query-agnostic: the context is read and compressed before anybody knows the question; question, end of turn, header and
the answer's beginning follow. Query-aware: the whole prompt is read at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import BadInput
from kvkeep.evaluate.sample import Sample

PROTOCOLS = ("agnostic", "aware")


@dataclass(frozen=True)
class Prompt:
    context: Tensor  # [n] ids that are compressed when they are read
    question: Tensor  # [m] ids that follow
    template: str  # "chat" or "plain"
    bos: int  # how many there are at the beginning
    cut: int  # tokens taken out of the middle to fit the window
    rule: str = "middle of the context"  # how

    @property
    def tokens(self) -> int:
        return len(self.context) + len(self.question)


def render(tokenizer: Any, sample: Sample, protocol: str, window: int) -> Prompt:
    """Leaves room for the answer in the window; what is too long loses its middle, and the row says how much."""
    text, halved = _halves(tokenizer, sample, window) if sample.margin is not None else (sample.context, 0)
    template = "chat" if sample.chat and tokenizer.chat_template else "plain"
    before, after = _around(tokenizer, text) if template == "chat" else (_bos(tokenizer), "")
    parts = [before + text, sample.question + after + sample.prefix]
    parts = parts if protocol == "agnostic" else ["".join(parts), ""]
    context, question = (torch.tensor(tokenizer(part, add_special_tokens=False).input_ids).long() for part in parts)
    room = window - sample.max_new_tokens - len(question)
    if room < 2:
        raise BadInput(
            f"{sample.task} '{sample.id}': question and answer take {window - room} tokens, the window has {window}."
        )
    cut = max(0, len(context) - room)
    if cut:
        context = torch.cat([context[: room // 2], context[len(context) - (room - room // 2) :]])
    bos = tokenizer.bos_token_id
    count = sum(1 for _ in _leading(context.tolist(), bos))
    rule = "middle of the prompt, halves decoded" if sample.margin is not None else Prompt.rule
    return Prompt(context, question, template, count, cut + halved, rule)


def _halves(tokenizer: Any, sample: Sample, window: int) -> tuple[str, int]:
    """LongBench's rule: the first and the last tokens of the whole prompt, decoded apart. -> context, tokens lost"""
    ask = sample.question + sample.prefix
    ids = tokenizer(sample.context + ask).input_ids
    half = max(0, window - sample.margin) // 2
    if len(ids) <= window - sample.margin:
        return sample.context, 0
    kept = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[len(ids) - half :]))
    if not kept.endswith(ask):
        raise BadInput(f"{sample.task} '{sample.id}': the question alone fills half of the window of {window} tokens.")
    return kept.removesuffix(ask), len(ids) - 2 * half


def _around(tokenizer: Any, context: str) -> tuple[str, str]:
    """What the chat template puts before a user's message and after it."""
    longest = max(map(len, re.findall("#+", context)), default=0)
    mark = "#" * (longest + 7)
    chat = [{"role": "user", "content": mark}]
    before, after = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False).split(mark)
    return before, after


def _bos(tokenizer: Any) -> str:
    """The beginning of a text, if this tokenizer puts one there."""
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token if tokenizer.bos_token and ids[0] == tokenizer.bos_token_id else ""


def _leading(ids: list[int], token: int | None):
    for each in ids:
        if each != token:
            return
        yield each
