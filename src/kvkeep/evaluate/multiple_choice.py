"""Multiple choice from a compressed cache: what is read is compressed, then each choice is weighed against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.engine.independent_batch import Abreast
from kvkeep.errors import BadInput
from kvkeep.evaluate.prefill import Row
from kvkeep.evaluate.prompt import Prompt
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.choice import pairs


def prompts(tokenizer: Any, sample: Sample, protocol: str, window: int) -> list[tuple[Prompt, Tensor]]:
    """For every choice, what is read and the ids that are scored: those a tokenizer makes of both together, less its
    own of the first. What is too long loses its beginning; the last token is scored and not read (lm-eval)."""
    found = []
    for read, scored in pairs(sample):
        context, whole = (torch.tensor(tokenizer(text).input_ids) for text in (read, read + scored))
        ids, cut = whole[len(context) :], max(0, len(whole) - window - 1)
        if cut and cut >= len(context):
            raise BadInput(f"{sample.task} '{sample.id}': a choice has {len(ids)} tokens, the model's window {window}.")
        bos = int(bool(len(context)) and int(context[0]) == tokenizer.bos_token_id)
        first = len(tokenizer(sample.context.rstrip()).input_ids) if sample.context else bos
        split = first if protocol == "agnostic" and first > max(bos, cut) else len(context)
        parts = context[cut:split], context[split:]
        found.append((Prompt(*parts, "plain", 0 if cut else bos, cut, "beginning of the prompt"), ids))
    return found


def loglikelihoods(row: Row, after: Tensor, question: Tensor, ids: Tensor) -> list[float]:
    """Of these tokens behind a question, for every row; after: logits behind what was read [rows, vocabulary]

    Rows that fetch are given them one by one, as they would write them: what they read at once they may see whole.
    """
    follow = (question, *ids[:-1].split(1)) if isinstance(row, Abreast) else (torch.cat([question, ids[:-1]]),)
    logits = [after[:, None].float()]
    logits += [row.feed(some.expand(len(after), -1), keep=0).float() for some in follow if len(some)]
    chances = torch.cat(logits, 1)[:, -len(ids) :].log_softmax(-1)
    return chances.gather(2, ids.to(chances.device).expand(len(after), -1)[..., None]).sum((1, 2)).tolist()


def preferred(sample: Sample, likelihoods: Sequence[float]) -> str:
    """The likeliest choice, the first of equals."""
    return sample.choices[likelihoods.index(max(likelihoods))]
