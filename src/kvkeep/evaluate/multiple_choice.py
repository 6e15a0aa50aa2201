"""Multiple choice from a compressed cache: the prompt is prefilled and compressed, then each choice is scored."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from kvkeep.engine.sequence import Sequence
from kvkeep.errors import BadInput
from kvkeep.evaluate.prompt import Prompt
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.choice import pairs


def choice_prompts(tokenizer: Any, sample: Sample, protocol: str, context_length: int) -> list[tuple[Prompt, Tensor]]:
    """For every choice, the prompt and the ids to score: those of prompt and choice tokenized together, less the
    prompt's. What is too long loses its beginning; the last token is scored but never an input (as in lm-eval)."""
    found = []
    for prompt, choice in pairs(sample):
        context, whole = (torch.tensor(tokenizer(text).input_ids) for text in (prompt, prompt + choice))
        ids, cut = whole[len(context) :], max(0, len(whole) - context_length - 1)
        if cut and cut >= len(context):
            raise BadInput(
                f"{sample.task} '{sample.id}': a choice has {len(ids)} tokens, the model's context length is "
                f"{context_length}."
            )
        bos = int(bool(len(context)) and int(context[0]) == tokenizer.bos_token_id)
        first = len(tokenizer(sample.context.rstrip()).input_ids) if sample.context else bos
        split = first if protocol == "agnostic" and first > max(bos, cut) else len(context)
        parts = context[cut:split], context[split:]
        found.append((Prompt(*parts, "plain", 0 if cut else bos, cut, "beginning of the prompt"), ids))
    return found


def loglikelihoods(contexts: Seq[Sequence], after: Tensor, question: Tensor, ids: Tensor) -> list[float]:
    """Of these tokens after the question, for every context; after: logits after the context [contexts, vocabulary]

    Retrieval methods get the tokens one by one, as in decode: of a chunk they may attend to every token.
    """
    chunk, steps = [torch.cat([question, ids[:-1]])], [question, *ids[:-1].split(1)]
    found = []
    for sequence, first in zip(contexts, after, strict=True):
        follow = chunk if sequence.cache.tracker.frozen else steps
        logits = [first[None], *(sequence.forward(some, keep=0) for some in follow if len(some))]
        scores = torch.cat(logits)[-len(ids) :].float().log_softmax(-1)
        found.append(float(scores.gather(1, ids.to(scores.device)[:, None]).sum()))
    return found


def most_likely_choice(sample: Sample, likelihoods: Seq[float]) -> str:
    """The likeliest choice, the first of equals."""
    return sample.choices[likelihoods.index(max(likelihoods))]
