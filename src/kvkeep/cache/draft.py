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
from kvkeep.cache.replay import LayerRows, RowText, no_call
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
    """What the model sees of a draft's layers: new tokens of all rows are appended, and their queries recorded."""

    seen = 0  # every token has a position id

    def __init__(self, model: Any, store: dict[int, RaggedLayer], between: Callable[[], None] = no_call) -> None:
        """store: what is kept of the text for the draft; between: called after every token"""
        super().__init__(model)
        self.store, self.between = store, between
        self.drafted: dict[int, RaggedLayer] = {}  # the rows that have a draft
        self.queries: dict[int, list[Tensor]] = {}  # of each step [rows, heads, 1, dim]
        self.positions: list[Tensor] = []  # of each row's token [1]

    @torch.no_grad()
    def __call__(self, texts: Sequence[RowText | None], count: int) -> LayerRows:
        """Queries of so many tokens after each of the texts. [heads, count, dim]"""
        rows = {row: text for row, text in enumerate(texts) if text and text.ids}
        if not rows:
            return {}
        device = execution_device(self.model)
        for index, layer in self.store.items():
            self.queries[index], self.drafted[index] = [], RaggedLayer()
            kept = [[head[:-1] for head in layer.row(row)] for row in rows]
            self.drafted[index].fill(kept, spare=count + 1)
        tokens = torch.tensor([text.ids[-1:] for text in rows.values()], device=device)
        positions = torch.tensor([[text.position - 1] for text in rows.values()], device=device)
        for step in range(count + 1):
            tokens = self._decode(tokens, positions + step)
            self.between()
        drafts = {index: torch.cat(queries[1:], 2) for index, queries in self.queries.items()}  # not the text's own
        return {(index, row): draft[i] for index, draft in drafts.items() for i, row in enumerate(rows)}

    def _decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions [rows, 1] -> the next ones"""
        self.positions = list(positions)
        out = self.model(tokens, position_ids=positions, past_key_values=self, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        self.queries[index].append(call.query)
        layer = self.drafted[index]
        layer.append(call.key, call.value, [where.to(call.key.device) for where in self.positions], None)
        return call.to_hf_output(layer.attend_step(call.query, *call.how))
