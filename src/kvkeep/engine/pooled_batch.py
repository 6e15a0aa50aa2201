"""Decoding from a pool: all rows in one step that is captured in a CUDA graph, one graph for every number of rows.

The pool grows with its requests. While a step runs on the device, the host detokenizes the step before; so a request
that ends early has run one step too many, whose token is ignored.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kvkeep.cache.cache import Cache
from kvkeep.cache.decode.row_pool import RowPool
from kvkeep.cache.decode.runner import Runner
from kvkeep.cache.report import format_bytes
from kvkeep.engine.batch import DecodeBatch, Decoded, InflightStep
from kvkeep.engine.memory import MEMORY_FRACTION, MemoryCap, free_device_bytes, free_host_bytes, slot_bytes, tail_bytes
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import SamplingRows
from kvkeep.engine.sequence import SequenceConfig
from kvkeep.errors import BadInput
from kvkeep.model.head_shards import agree_on_least
from kvkeep.model.hf_cache import execution_device, key_shape

USUAL_ANSWER, USUAL_BUDGET = 256, 2048  # tokens, where a warm-up has no others


class PooledBatch(DecodeBatch):
    """Requests over the rows of a pool."""

    def __init__(
        self,
        model: Any,
        storage: str | None = None,
        max_rows: int = 64,
        max_tokens: int | None = None,
        memory: MemoryCap | None = None,
        pool: Any = None,
    ) -> None:
        """max_tokens: per KV head, of all rows together, allocated at once; None: as needed, within `memory`

        pool: of a method that evicts or retrieves in decode; None: a `RowPool`
        """
        super().__init__(model, max_rows, memory)
        self.storage = storage
        self.device, self.kv_heads = execution_device(model), key_shape(model)[0]
        self.max_slots = None if max_tokens is None else max_tokens * self.kv_heads
        self.pool = RowPool(model, 1, 0, 1, storage) if pool is None else pool  # it grows
        self.runner = Runner(self.pool, max_rows)
        self.sampling = SamplingRows(max_rows, self.device)
        self.on_gpu = self.device.type == "cuda"
        self.lag = int(self.on_gpu)  # steps launched ahead

    def _has_memory(self, request: Request, waiting: Iterable[Request]) -> bool:
        """The pool grows for this one and those that wait, as far as memory allows."""
        cache = request.sequence.cache
        room = self.pool.room_for(cache, request.how.max_new_tokens)
        if not (self._fits(cache, room) and len(self.by_row) < self.pool.rows):
            slots = -agree_on_least(self.model, -self.pool.slots_needed(cache, room))
            alike = [each for each in waiting if self.pool.mixed or each.config.is_like(request.config)]
            soon = [each.expected_tokens for each in alike]
            more = [self.pool.slots_of(tokens) for tokens in soon[: self.max_rows - len(self.by_row) - 1]]
            self.reserve(slots, cache.longest_head + room, 1 + len(more), slots + sum(more))
        return self._fits(cache, room)

    def _fits(self, cache: Cache, room: int) -> bool:
        """In every process, where several have a part of the heads each."""
        return bool(agree_on_least(self.model, self.pool.fits(cache, room)))

    def reserve(self, slots: int, longest: int, rows: int, in_all: int) -> None:
        """Make room for a row of this size, and for so many rows and slots in all if memory allows."""
        pool, rows = self.pool, min(self.max_rows, len(self.by_row) + rows)
        if self.memory:
            rows = min(rows, 1 << len(self.by_row).bit_length())
        limit = self._slot_limit(max(rows, pool.rows))
        if slots > limit:
            raise BadInput(
                f"keys and values of one sequence take {format_bytes(slots * self._slot_bytes)}, and "
                f"{format_bytes(limit * self._slot_bytes)} can be used for them; use a smaller budget, fewer new "
                "tokens, storage='int8', or another max_tokens= or memory=."
            )
        longest = 1 << (longest - 1).bit_length()
        spare = limit - (self.memory.largest_prompt // self._slot_bytes if self.memory else 0)
        needed, wanted = slots if pool.largest_free < slots else 0, max(0, in_all - pool.unused)
        if needed and self.on_gpu:  # a step is captured anew for every size: it grows seldom, where there is memory
            likely = max(rows, pool.rows) * slots - pool.tokens
            wanted = max(wanted, min(likely, pool.tokens // 2, (limit - pool.tokens) // 2))
        most = pool.tokens + max(needed, min(spare - pool.tokens, wanted))
        tokens = self.max_slots or max(pool.tokens, min(limit, most))
        if pool.grow(max(rows, pool.rows), tokens, max(longest, pool.longest)):
            self.runner.graphs.clear()  # they have the old buffers

    @property
    def _slot_bytes(self) -> int:
        return slot_bytes(self.model, self.storage)

    def _slot_limit(self, rows: int = 0) -> int:
        """Slots of a layer that memory allows beside what so many rows take without any."""
        if self.max_slots:
            return self.max_slots
        if self.memory is not None:
            left = self.memory.left + self.pool.nbytes - rows * tail_bytes(self.model, self.storage)
            return agree_on_least(self.model, max(0, left) // self._slot_bytes)
        free = free_device_bytes(self.device) if self.on_gpu else free_host_bytes()
        if free is None:
            return sys.maxsize
        limit = int(MEMORY_FRACTION * (free + self.pool.nbytes)) // self._slot_bytes
        return agree_on_least(self.model, limit)

    def admit(self, request: Request) -> None:
        cache = request.sequence.cache
        row = self._free_row
        try:
            self.pool.admit(row, cache, request.how.max_new_tokens)
        except BaseException:
            self.pool.release(row)
            raise
        self.by_row[row] = request
        self.runner.tokens[row], self.runner.positions[row] = request.answer.ids[-1], cache.seen
        self.sampling.set(row, request.how, request.edit)
        request.drop_sequence()  # its tokens are in the pool

    def release(self, request: Request) -> None:
        row = self._row_of(request)
        del self.by_row[row]
        if request.keeps_cache and (request.steps or self.pool.moves):
            self.pool.complete(row, request.sequence.cache, request.steps)
            request.sequence.token_ids += request.answer.ids[: request.steps]
        self.pool.release(row)
        self.sampling.set(row, None)

    def warmup(self, config: SequenceConfig, rows: int, progress: Callable[[str], None]) -> None:
        """Make room for so many rows, and a graph for every number of rows."""
        if self.on_gpu:  # elsewhere nothing is captured, and a pool grows at little cost
            self._grow_for(config, rows)
            self._capture(progress)

    def _grow_for(self, config: SequenceConfig, rows: int) -> None:
        """Make room for rows of this budget and USUAL_ANSWER tokens."""
        kept = config.budget if isinstance(config.budget, int) else USUAL_BUDGET
        slots = self.pool.slots_of(kept + USUAL_ANSWER)
        self.reserve(slots, config.longest_head(kept) + USUAL_ANSWER, rows, rows * slots)

    def _capture(self, progress: Callable[[str], None]) -> None:
        for size in sorted({min(1 << n, self.pool.rows) for n in range(self.pool.rows.bit_length() + 1)}):
            progress(f"capturing {size} rows")
            with torch.inference_mode():
                self.runner.prepare(size)

    def launch(self) -> None:
        """Decode one token for every row in use, and for free rows between them; none if all have their last one."""
        if self._ends:
            return
        rows = self._rows
        with torch.inference_mode(False), torch.no_grad():
            if self.pool.begin_step():
                self.runner.graphs.clear()  # they have the old buffers
        with torch.inference_mode():
            logits, tokens = self.runner(rows), self.runner.tokens[:rows, 0]
            positions = self.runner.positions[:rows, 0]
            self.inflight.append(InflightStep.sample(self.by_row, self.sampling, logits, positions, tokens))

    @property
    def _rows(self) -> int:
        """Rows of a step: those in use, and free ones between them; on a GPU as many as are captured."""
        rows = max(self.by_row) + 1
        return min(1 << (rows - 1).bit_length(), self.pool.rows) if self.on_gpu else rows

    @property
    def replays(self) -> bool:
        captured = self.runner.graphs.get(self._rows) if self.by_row else None
        return captured is not None and captured.graph is not None

    def collect(self) -> list[Decoded]:
        ahead = 0 if self.sampling.constrained else self.lag  # a constraint has to know a token before the next
        ready = max(len(self.inflight) - ahead, int(bool(self.inflight) and self._ends))
        return [each for _ in range(ready) for each in self.inflight.popleft().wait()]

    @property
    def _ends(self) -> bool:
        """Whether the steps that run already decode the last token of every request."""
        running = Counter(request for step in self.inflight for request in step.requests.values())
        requests = self.by_row.values()
        return all(len(each.answer.ids) + running[each] >= each.how.max_new_tokens for each in requests)

    def clear(self) -> None:
        for row, request in self.by_row.items():
            self.pool.release(row)
            self.sampling.set(row, None)
            if request.keeps_cache and not request.sequence.cache.seen:  # its tokens were in the pool alone
                request.sequence.token_ids = []
        super().clear()
