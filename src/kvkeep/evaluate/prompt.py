"""From a sample to input ids: those that are prefilled and compressed, and those that follow.

Query-agnostic: the context is prefilled and compressed before the question is known; question, end of turn, header and
the answer's prefix follow. Query-aware: the whole prompt is prefilled at once.

The two are tokenized separately. White space between them goes to the question: tokenizers join it to the word that
follows, and models answer worse if the question's first token differs from that in the whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import BadInput, NoData
from kvkeep.evaluate.sample import Sample, Turn
from kvkeep.model.chat import bos_text, common_prefix_length, split_template
from kvkeep.model.user_text import ids_of

PROTOCOLS = ("agnostic", "aware")
HALVES, AGAIN = "middle of the prompt, halves decoded", "; then middle of the ids, to fit the window"


@dataclass(frozen=True)
class Prompt:
    context: Tensor  # [n] ids that are prefilled and compressed
    question: Tensor  # [m] ids that follow, never evicted
    template: str  # "chat" or "plain"
    bos: int  # BOS tokens at the beginning
    cut: int  # tokens truncated to fit the context length
    rule: str = "middle of the context"  # how they were chosen

    @property
    def tokens(self) -> int:
        return len(self.context) + len(self.question)


def build_prompt(
    tokenizer: Any, sample: Sample, protocol: str, context_length: int, max_length: int | None = None
) -> Prompt:
    """A prompt that is too long loses its middle; Prompt.cut says how much.

    context_length: the model's, answer included. max_length: tokens of a prompt, if fewer; LongBench's rule
    truncates once, before the template, and again only where that still exceeds the context length.
    """
    halved = 0
    if sample.margin is not None:
        sample, halved = _halves(tokenizer, sample, _limit(sample, sample.margin, context_length, max_length))
    template = "chat" if sample.chat and tokenizer.chat_template else "plain"
    before, after = bos_text(tokenizer), ""
    if template == "chat":  # thinking is off
        before, after = split_template(tokenizer, enable_thinking=False)
    context, question = before + sample.context, sample.question + after + sample.prefix
    bare = context.rstrip() if protocol == "agnostic" and question else context + question
    first, second = (ids_of(tokenizer, text) for text in (bare, (context + question).removeprefix(bare)))
    ids, seam = first + second, len(first)
    limit = context_length - sample.max_new_tokens
    if sample.margin is None:
        limit = min(limit, max_length or limit)
    room = limit - (len(ids) - seam)
    if room < 2:
        taken, new = len(ids) - seam, sample.max_new_tokens
        raise BadInput(
            f"{sample.task} '{sample.id}': question and answer take {taken + new} tokens, there are {limit + new}."
        )
    cut = max(0, seam - room)
    read = ids[: room // 2] + ids[seam - (room - room // 2) : seam] if cut else ids[:seam]
    bos = len(list(takewhile(lambda token: token == tokenizer.bos_token_id, read)))
    rule = HALVES + AGAIN * bool(cut) if sample.margin is not None else Prompt.rule
    return Prompt(torch.tensor(read).long(), torch.tensor(ids[seam:]).long(), template, bos, cut + halved, rule)


def answerable(samples: Sequence[Sample], context_length: int) -> tuple[list[Sample], dict[str, str]]:
    """Samples whose answers leave room for a prompt, and the tasks left out, with the reason."""
    why = {sample.task: reason for sample in samples if (reason := _unanswerable(sample, context_length))}
    found = [sample for sample in samples if sample.task not in why]
    if not found:
        raise NoData(
            f"none of these tasks can be answered: {'; '.join(f'{task} {text}' for task, text in why.items())}."
        )
    return found, why


def _unanswerable(sample: Sample, context_length: int) -> str:
    """Say why there is no room for a prompt; "" if there is. Nothing of a conversation is truncated."""
    limit = f"the model's context length is {context_length:,}"
    if isinstance(sample, Turn) and (length := sample.extra.get("length", 0)) > context_length:
        return f"is a conversation of {length:,} tokens, and {limit}"
    needed = sample.max_new_tokens
    return f"may take {needed:,} tokens to answer, and {limit}" if needed + 2 > context_length else ""


def _halves(tokenizer: Any, sample: Sample, limit: int) -> tuple[Sample, int]:
    """LongBench's rule: the first and the last tokens of the whole prompt, decoded separately. -> sample, tokens lost

    Context, question and prefix are split where their ids are, so each is as the tokenizer decodes it.
    """
    parts = sample.context, sample.question, sample.prefix
    ids = tokenizer("".join(parts)).input_ids
    if len(ids) <= limit:
        return sample, 0
    half = limit // 2
    seams = [common_prefix_length(ids, tokenizer("".join(parts[:n])).input_ids) for n in (1, 2)]
    kept = [_parted(tokenizer, ids, seams, *ends) for ends in ((0, half), (len(ids) - half, len(ids)))]
    context, question, prefix = map("".join, zip(*kept, strict=True))
    return replace(sample, context=context, question=question, prefix=prefix), len(ids) - 2 * half


def _limit(sample: Sample, margin: int, context_length: int, max_length: int | None) -> int:
    """Tokens of a prompt without its template."""
    free = sample.limits.get(context_length, context_length - margin)
    limit = min(max_length, context_length - sample.max_new_tokens) if max_length else free
    if limit < 2:
        raise BadInput(
            f"{sample.task} '{sample.id}': a context length of {context_length} tokens leaves none for a prompt: "
            f"{margin} of it stay free, and the answer may have {sample.max_new_tokens}."
        )
    return limit


def _parted(tokenizer: Any, ids: list[int], seams: list[int], start: int, end: int) -> list[str]:
    """The text of ids[start:end], split at the seams inside it; no character is lost or cut in two."""
    text = tokenizer.decode(ids[start:end], skip_special_tokens=True)
    befores = [tokenizer.decode(ids[start : max(start, min(seam, end))], skip_special_tokens=True) for seam in seams]
    first, second = sorted(common_prefix_length(text, before) for before in befores)
    return [text[:first], text[first:second], text[second:]]
