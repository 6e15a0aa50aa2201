"""Which tokens a retrieval method attends to, window by window of the prefill."""

from __future__ import annotations

from typing import Any

import torch

from kvkeep.compress.method import Method
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.pages.inspection import Windows, binned, kept_mask
from kvkeep.pages.packed import pack_levels


def window_retrieval(
    model: Any, tokenizer: Any, ids: list[int], tokens: int, method: Method, budget: Any, question: str | None
) -> Windows | None:
    """Prefills once more, a window at a time; None for a method that has no windows.

    tokens: of the prompt that ids are the beginning of; question: if it is known then
    """
    if not (method.retrieval and method.retrieval.window):
        return None
    size = method.retrieval.window
    sequence = SequenceConfig(model, tokenizer, method, budget, prefill_chunk_size=size).new_sequence()
    if question:
        sequence.set_question(question, len(ids))
    prompt, rows = torch.tensor(ids), []
    each = binned(torch.ones(1, tokens))
    while len(chunk := sequence.next_chunk(prompt)):
        sequence.forward(chunk)
        rows.append(binned(kept_mask(sequence.cache, tokens).float().mean(1)) / each)
    return Windows(size, pack_levels(torch.stack(rows, 1), 1.0))
