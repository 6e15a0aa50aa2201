"""Engines side by side: a token for each of them in one forward pass, whatever their methods and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.model.adapter import AdaptedCache
from kvkeep.model.attention import Handover

if TYPE_CHECKING:
    from kvkeep.engine.generate import Engine


class Abreast(AdaptedCache):
    """A row for every engine; each attends through its own cache. Longer texts are read one engine after the other."""

    def __init__(self, model: Any, engines: Sequence[Engine] = ()) -> None:
        super().__init__(model)
        self.engines = list(engines)

    @property
    def seen(self) -> int:
        """Of whoever has read most: where a row goes on, it is told."""
        return max(engine.cache.seen for engine in self.engines)

    def attend(self, index: int, new: Handover) -> tuple[Tensor, Tensor | None]:
        rows = (replace(new, query=q, key=k, value=v, plain=False) for q, k, v in _rows(new))
        outputs = [engine.cache.attend(index, row)[0] for engine, row in zip(self.engines, rows, strict=True)]
        return torch.cat(outputs), None

    def feed(self, ids: Tensor, keep: int = 1) -> Tensor:
        """ids [rows, q] -> logits of the last `keep` tokens, 0: of all [rows, keep, vocabulary]"""
        if ids.shape[1] > 1 or not self.shares:
            return torch.stack([engine.feed(row, keep) for engine, row in zip(self.engines, ids, strict=True)])
        for engine, row in zip(self.engines, ids, strict=True):
            engine.announce(row)
        places, device = torch.tensor([[engine.cache.seen] for engine in self.engines]), self.model.device
        with torch.inference_mode():
            logits = self.model(ids.to(device), position_ids=places.to(device), past_key_values=self).logits
        for engine, row, after in zip(self.engines, ids, logits, strict=True):
            engine.took(row, after)
        return logits

    @property
    def shares(self) -> bool:
        """No layer is left to transformers, which would keep its own rows."""
        return len(self.owned) == len(self.layers)

    def take(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.engines = [self.engines[row] for row in rows]


def _rows(new: Handover) -> zip:
    return zip(*(t.split(1) for t in (new.query, new.key, new.value)), strict=True)
