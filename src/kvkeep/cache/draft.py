"""A few tokens decoded from what another method keeps of a text, before anything of it is evicted: their queries.

The text's last token is fed once more, without its copy in the draft's layers: so the first token of the draft comes
from the same layers as the others. The text itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.backend import CacheState
from kvkeep.cache.replay import KeyValues, LayerRows, RowText, attend_appended, no_call
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter, execution_device
from kvkeep.storage.ragged import RaggedLayer


def draft_queries(cache: CacheState) -> LayerRows:
    """Of a draft of the answer, decoded from what another method keeps of the text, if the method wants one."""
    if not (draft := cache.method.draft):
        return {}
    seen, texts = cache.tracker.seen, cache.unreplayed.rows
    store = {i: RaggedLayer() for i in cache.backend.store}
    cache.backend.evict_into(store, draft.method, seen, [True] * len(seen), {}, {})
    evicts = [n > cache.backend.budget.tokens(n) for n in seen]
    rows = [text if each else None for text, each in zip(texts, evicts, strict=True)]
    return DraftForward(cache.model, store, cache.between_passes)(rows, draft.tokens)


class DraftForward(HFCacheAdapter):
    """What the model sees of a draft's layers, row by row: new tokens are appended, and their queries recorded."""

    seen = 0  # every token has a position id

    def __init__(self, model: Any, store: dict[int, RaggedLayer], between: Callable[[], None] = no_call) -> None:
        """store: what is kept of the text for the draft; between: called after every token"""
        super().__init__(model)
        self.store, self.row, self.between = store, 0, between
        self.heads: dict[int, list[KeyValues]] = {}
        self.queries: LayerRows = {}  # [heads, drafted, dim]

    @torch.no_grad()
    def __call__(self, rows: Sequence[RowText | None], count: int) -> LayerRows:
        """Queries of so many tokens after each of the texts. [heads, count, dim]"""
        for self.row, text in enumerate(rows):
            if text and text.ids:
                kept = {i: layer.row(self.row) for i, layer in self.store.items()}
                self.heads = {i: [(head.keys[:-1], head.values[:-1]) for head in each] for i, each in kept.items()}
                token = torch.tensor([text.ids[-1:]])
                for step in range(count + 1):
                    token = self._decode(token, text.position - 1 + step)
                    self.between()
        return {key: queries[:, 1:] for key, queries in self.queries.items()}  # not the text's own

    def _decode(self, token: Tensor, position: int) -> Tensor:
        device = execution_device(self.model)
        positions = torch.tensor([[position]], device=device)
        out = self.model(token.to(device), position_ids=positions, past_key_values=self, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        before, query = self.queries.get((index, self.row)), call.query[0]
        self.queries[index, self.row] = query if before is None else torch.cat([before, query], 1)
        output, self.heads[index] = attend_appended(call, self.heads[index])
        return call.to_hf_output(output)
