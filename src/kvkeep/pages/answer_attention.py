"""What an answer really attended to: the attention of its queries over the full cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.cache import Cache
from kvkeep.compress.attention import attention_received
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import execution_device
from kvkeep.types import Observation


class AttentionRecorder(Cache):
    """A full cache that sums the attention of a forward pass's last queries, layer by layer."""

    def __init__(self, model: Any, last: int) -> None:
        super().__init__(model, "full")
        self.last, self.received = last, dict[int, Tensor]()  # layer -> [kv_heads, n]

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        query, key, value = call.query[0], call.key[0], call.value[0]
        heads, n = key.shape[:2]
        positions = torch.arange(n, device=key.device).expand(heads, n)
        seen = Observation(query[:, -self.last :], key, value, positions, (n,) * heads, n, n, *call.how)
        self.received[index] = attention_received(seen, self.last).cpu()
        return super().attend(index, call)


def answer_attention(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Attention to each token of a prompt, on average over the queries that predict the answer's tokens.

    Of each layer, averaged over the query heads of a key head. -> [layers, kv_heads, tokens] float32
    """
    recorder = AttentionRecorder(model, len(answer))
    ids = torch.tensor([prompt + answer[:-1]], device=execution_device(model))
    with torch.inference_mode():
        model(ids, past_key_values=recorder, logits_to_keep=1)
    return torch.stack(list(recorder.received.values()))[..., : len(prompt)] / len(answer)
