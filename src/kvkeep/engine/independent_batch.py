"""Batches of sequences with caches of their own: one token each per forward pass, whatever the methods and budgets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.engine.row_pool import MEMORY_FRACTION, free_host_bytes, row_bytes
from kvkeep.engine.sampling import Sampler
from kvkeep.engine.scheduler import Request
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import StoreFull
from kvkeep.model.chat import eos_token_ids
from kvkeep.model.hf_attention import AttentionCall
from kvkeep.model.hf_cache import HFCacheAdapter, execution_device

OUT_OF_MEMORY = torch.OutOfMemoryError, StoreFull


class IndependentBatch(HFCacheAdapter):
    """A row for every sequence; each attends through its own cache. Several tokens are prefilled one by one."""

    def __init__(self, model: Any, sequences: Iterable[Sequence]) -> None:
        super().__init__(model)
        self.sequences = list(sequences)

    @property
    def seen(self) -> int:
        """Of the longest row; every row has position ids of its own."""
        return max(sequence.cache.seen for sequence in self.sequences)

    def attend(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        qkv = zip(*(t.split(1) for t in (call.query, call.key, call.value)), strict=True)
        rows = (replace(call, query=q, key=k, value=v, is_sdpa=False) for q, k, v in qkv)
        outputs = [sequence.cache.attend(index, row)[0] for sequence, row in zip(self.sequences, rows, strict=True)]
        return torch.cat(outputs), None

    def extend(self, ids: Tensor, keep: int = 1) -> Tensor:
        """ids [rows, q] -> logits of the last `keep` tokens, 0: of all [rows, keep, vocabulary]"""
        if ids.shape[1] > 1 or not self.shares_forward:
            return torch.stack([sequence.extend(row, keep) for sequence, row in zip(self.sequences, ids, strict=True)])
        for sequence, row in zip(self.sequences, ids, strict=True):
            sequence.before_forward(row)
        positions = torch.tensor([[sequence.cache.seen] for sequence in self.sequences])
        device = execution_device(self.model)
        with torch.inference_mode():
            logits = self.model(ids.to(device), position_ids=positions.to(device), past_key_values=self).logits
        for sequence, row, after in zip(self.sequences, ids, logits, strict=True):
            sequence.after_forward(row, after)
        return logits

    @property
    def shares_forward(self) -> bool:
        """Every layer is compressed: one left to transformers would keep rows of its own."""
        return len(self.compressed_layers) == len(self.layers)

    def select_rows(self, rows: Iterable[int]) -> None:
        """Keep these rows only."""
        self.sequences = [self.sequences[row] for row in rows]


@dataclass
class RunningRequest:
    """A request, and its sequence."""

    request: Request
    sequence: Sequence
    logits: Tensor  # after its last token [vocabulary]
    sampler: Sampler

    def sample(self, eos_token_ids: set[int]) -> bool:
        """Sample the next token. -> whether the answer is complete"""
        self.request.add(self.sampler(self.logits), eos_token_ids)
        return self.request.done


class IndependentScheduler:
    """Decodes each request as it would be alone up to rounding. Requests that do not fit wait until others finish."""

    def __init__(self, config: SequenceConfig, question: str | None, rows: int, seed: int) -> None:
        self.config, self.question, self.rows, self.seed = config, question, rows, seed
        self.host_budget = config.new_sequence().cache.host_budget  # shared by all of them
        self.eos_token_ids = eos_token_ids(config.model, config.tokenizer)
        self.running: list[RunningRequest] = []

    def run(self, requests: Iterable[Request]) -> None:
        waiting = deque(requests)
        while waiting or self.running:
            while waiting and len(self.running) < self.rows and self._admit(waiting[0]):
                waiting.popleft()
            self.running = [each for each in self.running if not each.sample(self.eos_token_ids)]
            waiting.extendleft(reversed(self._step()))

    def _admit(self, request: Request) -> bool:
        """Prefill a request, if there is room beside the running ones. -> False: it has to wait"""
        if self.running and not self._fits(request):
            return False
        sequence = self.config.new_sequence()
        sequence.cache.share_host_budget(self.host_budget)
        try:
            if self.question is not None:
                sequence.set_question(self.question, len(request.ids))
            logits = sequence.prefill(request.ids)
        except OUT_OF_MEMORY as error:
            if self.running:
                self.rows = len(self.running)
                return False
            request.fail(error)
        else:
            sampler = Sampler(request.temperature, request.top_p, self.seed, request.top_k)
            self.running.append(RunningRequest(request, sequence, logits, sampler))
        return True

    def _fits(self, request: Request) -> bool:
        """Whether a retrieval method's tokens fit into host memory; where host_limit is set, that is the limit."""
        unlimited = self.config.method.retrieval and self.config.cache_options["host_limit"] is None
        free = free_host_bytes() if unlimited else None
        size = row_bytes(self.config.model, len(request.ids) + request.max_new_tokens)
        return free is None or size <= MEMORY_FRACTION * free

    def _step(self) -> list[Request]:
        """Decode one token for every running request. -> on OOM, the requests to restart in a batch of half the size"""
        if not self.running:
            return []
        requests = [each.request for each in self.running]
        batch = IndependentBatch(self.config.model, [each.sequence for each in self.running])
        try:
            logits = batch.extend(torch.tensor([request.detokenizer.ids[-1:] for request in requests]))
        except OUT_OF_MEMORY as error:
            self.running, self.rows = [], max(1, len(requests) // 2)
            if len(requests) == 1:
                requests.pop().fail(error)
            for request in requests:
                request.restart()
            return requests
        for each, after in zip(self.running, logits, strict=True):
            each.logits = after[-1]
        return []
