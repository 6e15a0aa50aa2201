"""From a sample to the ids a model reads: what may be compressed, and what comes after.

Query-agnostic: the context is read and compressed before anybody knows the question; question, end of turn, header and
the answer's beginning follow. Query-aware: the whole prompt is read at once.

Ids are made of the two apart. White space between them goes to the question: tokenizers join it to the word that
follows, and a question that begins otherwise than in the whole prompt is one the model answers worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import BadInput, NoData
from kvkeep.evaluate.sample import Sample
from kvkeep.model.chat import around, beginning, ids_of, shared

PROTOCOLS = ("agnostic", "aware")
HALVES, AGAIN = "middle of the prompt, halves decoded", "; then middle of the ids, to fit the window"


@dataclass(frozen=True)
class Prompt:
    context: Tensor  # [n] ids that are compressed when they are read
    question: Tensor  # [m] ids that follow
    template: str  # "chat" or "plain"
    bos: int  # how many there are at the beginning
    cut: int  # tokens taken out to fit the window
    rule: str = "middle of the context"  # how

    @property
    def tokens(self) -> int:
        return len(self.context) + len(self.question)


def render(tokenizer: Any, sample: Sample, protocol: str, window: int, max_length: int | None = None) -> Prompt:
    """What is too long loses its middle, and the row says how much.

    window: tokens the model can see, answer included. max_length: tokens of a prompt, if they are to be fewer; a sample
    that is cut as LongBench does is so once, before the template, and again only if the window has no room for it.
    """
    sample, halved = _halves(tokenizer, sample, window, max_length) if sample.margin is not None else (sample, 0)
    template = "chat" if sample.chat and tokenizer.chat_template else "plain"
    before, after = beginning(tokenizer), ""
    if template == "chat":  # models that can think aloud do not
        before, after = around(tokenizer, enable_thinking=False)
    context, question = before + sample.context, sample.question + after + sample.prefix
    bare = context.rstrip() if protocol == "agnostic" and question else context + question
    first, second = (ids_of(tokenizer, text) for text in (bare, (context + question).removeprefix(bare)))
    ids, seam = first + second, len(first)
    limit = window - sample.max_new_tokens
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
    bos = sum(1 for _ in _leading(read, tokenizer.bos_token_id))
    rule = HALVES + AGAIN * bool(cut) if sample.margin is not None else Prompt.rule
    return Prompt(torch.tensor(read).long(), torch.tensor(ids[seam:]).long(), template, bos, cut + halved, rule)


def answerable(samples: Sequence[Sample], window: int) -> tuple[list[Sample], dict[str, str]]:
    """Samples whose answers leave room for a prompt, and the tasks that have others, with the reason."""
    why = {
        sample.task: f"may take {sample.max_new_tokens:,} tokens to answer, and the model's window has {window:,}"
        for sample in samples
        if sample.max_new_tokens + 2 > window
    }
    found = [sample for sample in samples if sample.task not in why]
    if not found:
        raise NoData(
            f"none of these tasks can be answered: {'; '.join(f'{task} {text}' for task, text in why.items())}."
        )
    return found, why


def _halves(tokenizer: Any, sample: Sample, window: int, max_length: int | None) -> tuple[Sample, int]:
    """LongBench's rule: the first and the last tokens of the whole prompt, decoded apart. -> what is left, tokens lost

    Context, question and prefix part where their ids do, so each is as the tokenizer writes it, or what is left of it.
    """
    limit = _limit(sample, window, max_length)
    parts = sample.context, sample.question, sample.prefix
    ids = tokenizer("".join(parts)).input_ids
    if len(ids) <= limit:
        return sample, 0
    half = limit // 2
    seams = [shared(ids, tokenizer("".join(parts[:n])).input_ids) for n in (1, 2)]
    kept = [_parted(tokenizer, ids, seams, *ends) for ends in ((0, half), (len(ids) - half, len(ids)))]
    context, question, prefix = map("".join, zip(*kept, strict=True))
    return replace(sample, context=context, question=question, prefix=prefix), len(ids) - 2 * half


def _limit(sample: Sample, window: int, max_length: int | None) -> int:
    """Tokens of a prompt, template apart."""
    free = sample.limits.get(window, window - sample.margin)
    limit = min(max_length, window - sample.max_new_tokens) if max_length else free
    if limit < 2:
        raise BadInput(
            f"{sample.task} '{sample.id}': a window of {window} tokens leaves none for a prompt: "
            f"{sample.margin} of it stay free, and the answer may have {sample.max_new_tokens}."
        )
    return limit


def _parted(tokenizer: Any, ids: list[int], seams: list[int], start: int, end: int) -> list[str]:
    """The text of some of the ids, cut at the seams that are in it; no letter is lost or cut in two."""
    text = tokenizer.decode(ids[start:end], skip_special_tokens=True)
    befores = [tokenizer.decode(ids[start : max(start, min(seam, end))], skip_special_tokens=True) for seam in seams]
    first, second = sorted(shared(text, before) for before in befores)
    return [text[:first], text[first:second], text[second:]]


def _leading(ids: list[int], token: int | None):
    for each in ids:
        if each != token:
            return
        yield each
