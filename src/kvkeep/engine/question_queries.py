"""Reading a question alone, to know what a text is read for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.compress.retrieval.query import joined
from kvkeep.model.hf_attention import Handover
from kvkeep.model.hf_cache import AdaptedCache
from kvkeep.model.rope import Rotation


class Listener(AdaptedCache):
    """Keeps every layer's queries, and nothing else."""

    seen = 0

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.heard: dict[int, Handover] = {}

    def attend(self, index: int, new: Handover) -> tuple[Tensor, Tensor | None]:
        self.heard[index] = new
        return new.stock()


def listen(model: Any, ids: Tensor, rotations: dict[int, Rotation | None], edge: int) -> dict[int, Tensor]:
    """The question's queries as they meet keys put away. ids [1, x] -> layer: [x, kv_heads * dim]"""
    listener = Listener(model)
    with torch.inference_mode():
        model(ids, past_key_values=listener, logits_to_keep=1)
    found = {}
    for index, new in listener.heard.items():
        query, turn = new.query[0], rotations.get(index)
        if turn is not None:
            positions = torch.arange(query.shape[1], device=query.device)
            query = turn.turn(query, edge - positions)
        found[index] = joined(query, new.key.shape[1])
    return found
