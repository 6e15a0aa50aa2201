"""Engines side by side: a token for each of them in one forward pass, whatever their methods and budgets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.engine.row_pool import SHARE, host_bytes, row_bytes
from kvkeep.engine.sampling import Sampler
from kvkeep.engine.scheduler import Request
from kvkeep.errors import StoreFull
from kvkeep.model.chat import ends
from kvkeep.model.hf_attention import Handover
from kvkeep.model.hf_cache import AdaptedCache, runs_on

if TYPE_CHECKING:
    from kvkeep.engine.engine import Engine

FULL = torch.OutOfMemoryError, StoreFull


class Abreast(AdaptedCache):
    """A row for every engine; each attends through its own cache. Longer texts are read one engine after the other."""

    def __init__(self, model: Any, engines: Sequence[Engine]) -> None:
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
        places, device = torch.tensor([[engine.cache.seen] for engine in self.engines]), runs_on(self.model)
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


@dataclass
class Writer:
    """One prompt, read by an engine of its own."""

    request: Request
    engine: Engine
    logits: Tensor  # after what was read and written so far [vocabulary]
    sampler: Sampler

    def draw(self, last: set[int]) -> bool:
        """Add the next token. -> whether that was the last"""
        self.request.add(self.sampler(self.logits), last)
        return self.request.done


class SideBySide:
    """Prompts, each written as it would be alone up to rounding. Who does not fit waits until others are done."""

    def __init__(self, engine: Engine, question: str | None, rows: int, seed: int) -> None:
        self.engine, self.question, self.rows, self.seed = engine, question, rows, seed
        self.purse = engine.apart().cache.purse  # what all of them may put away
        self.last = ends(engine.model, engine.tokenizer)
        self.at_work: list[Writer] = []

    def write(self, requests: Sequence[Request]) -> None:
        waiting = deque(requests)
        while waiting or self.at_work:
            while waiting and len(self.at_work) < self.rows and self._lets_in(waiting[0]):
                waiting.popleft()
            self.at_work = [writer for writer in self.at_work if not writer.draw(self.last)]
            waiting.extendleft(reversed(self._step()))

    def _lets_in(self, request: Request) -> bool:
        """Read a prompt, if there is room beside those at work. -> False: it has to wait"""
        if self.at_work and not self._fits(request):
            return False
        twin = self.engine.apart()
        twin.cache.pay_from(self.purse)
        try:
            if self.question is not None:
                twin.read_for(self.question, len(request.ids))
            logits = twin.prefill(request.ids)
        except FULL as error:
            if self.at_work:
                self.rows = len(self.at_work)
                return False
            request.refuse(error)
        else:
            sampler = Sampler(request.temperature, request.top_p, self.seed, request.top_k)
            self.at_work.append(Writer(request, twin, logits, sampler))
        return True

    def _fits(self, request: Request) -> bool:
        """Where nothing is dropped, the host has to hold it, unless somebody said how much it may."""
        free = host_bytes() if self.engine.method.recall and self.engine.options["host_limit"] is None else None
        size = row_bytes(self.engine.model, len(request.ids) + request.max_new_tokens)
        return free is None or size <= SHARE * free

    def _step(self) -> list[Request]:
        """Everybody's next pass. -> who has to begin again, fewer at a time, since there was no room for all"""
        if not self.at_work:
            return []
        requests = [writer.request for writer in self.at_work]
        abreast = Abreast(self.engine.model, [writer.engine for writer in self.at_work])
        try:
            logits = abreast.feed(torch.tensor([request.words.ids[-1:] for request in requests]))
        except FULL as error:
            self.at_work, self.rows = [], max(1, len(requests) // 2)
            if len(requests) == 1:
                requests.pop().refuse(error)
            for request in requests:
                request.begin_again()
            return requests
        for writer, after in zip(self.at_work, logits, strict=True):
            writer.logits = after[-1]
        return []
