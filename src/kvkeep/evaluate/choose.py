"""Multiple choice from a compressed cache: what is read is compressed, then each choice is weighed against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.engine.session import Cache
from kvkeep.errors import BadInput
from kvkeep.evaluate.render import Prompt
from kvkeep.evaluate.sample import Sample
from kvkeep.evaluate.tasks.choice import pairs


def prompts(tokenizer: Any, sample: Sample, protocol: str, window: int) -> list[tuple[Prompt, Tensor]]:
    """For every choice, what is read and the ids that are scored: those a tokenizer makes of both together, less its
    own of the first."""
    found = []
    for read, scored in pairs(sample):
        context, whole = (torch.tensor(tokenizer(text).input_ids) for text in (read, read + scored))
        if len(whole) > window:
            raise BadInput(f"{sample.task} '{sample.id}' has {len(whole)} tokens, the model's window {window}.")
        bos = int(bool(len(context)) and int(context[0]) == tokenizer.bos_token_id)
        first = len(tokenizer(sample.context.rstrip()).input_ids) if sample.context else bos
        split = first if protocol == "agnostic" and first > bos else len(context)
        found.append((Prompt(context[:split], context[split:], "plain", bos, 0), whole[len(context) :]))
    return found


def loglikelihood(model: Any, cache: Cache, logits: Tensor, ids: Tensor) -> float:
    """Of these tokens after what the cache has read; logits [vocabulary] are those of the first. The cache moves on."""
    rows = logits[None].float()
    if len(ids) > 1:
        with torch.inference_mode():
            more = model(ids[None, :-1].to(model.device), past_key_values=cache).logits[0]
        rows = torch.cat([rows, more.float()])
    return float(rows.log_softmax(-1).gather(1, ids[:, None].to(rows.device)).sum())


def preferred(sample: Sample, likelihoods: Sequence[float]) -> str:
    """The likeliest choice, the first of equals."""
    return sample.choices[likelihoods.index(max(likelihoods))]
