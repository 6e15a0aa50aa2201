"""The queries of a question, captured in a forward pass of its own, for retrieval while a text is prefilled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.kernels.torch.retrieval_units import concat_heads
from kvkeep.kernels.torch.rotation import Rotation
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter


class QueryCapture(HFCacheAdapter):
    """Records every layer's attention call, and caches nothing."""

    seen = 0

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        self.calls[index] = call
        return call.hf_attention()


def capture_question_queries(
    model: Any, ids: Tensor, rotations: dict[int, Rotation | None], edge: int
) -> dict[int, Tensor]:
    """The question's queries as they meet offloaded keys. ids [1, x] -> layer: [x, kv_heads * dim]"""
    capture = QueryCapture(model)
    with torch.inference_mode():
        model(ids, past_key_values=capture, logits_to_keep=1)
    found = {}
    for index, call in capture.calls.items():
        query, rotation = call.query[0], rotations.get(index)
        if rotation is not None:
            positions = torch.arange(query.shape[1], device=query.device)
            query = rotation.rotate(query, edge - positions)
        found[index] = concat_heads(query, call.key.shape[1])
    return found
