"""A transformers Cache that keeps, per row, layer and key head, only what its method chooses.

After every forward pass of more than one token, each row's kept tokens and its new ones compete for the budget, judged
by the row's newest queries. Single-token passes (decoding) add, and compete when the schedule says so. So a long prompt
fed in chunks never holds more than budget + chunk tokens, and every turn of a conversation ends its prefill within the
budget. (Longer than most files: it is the one class that answers to transformers' whole cache interface.)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import serialize
from kvkeep.cache.eviction import Contest
from kvkeep.cache.padding import Arrival, Arrivals
from kvkeep.cache.query_buffer import Observer
from kvkeep.cache.report import Report, by_part, human, told
from kvkeep.cache.retrieval import Recaller
from kvkeep.cache.self_check import Watch
from kvkeep.cache.step_eviction import Stepper
from kvkeep.compress.method import Method
from kvkeep.compress.parse import parse
from kvkeep.compress.schedule import Schedule, as_schedule
from kvkeep.errors import BadParameter, CacheMisuse, KvkeepError
from kvkeep.kernels.torch.reference import attend
from kvkeep.model.hf_attention import Handover, with_sums
from kvkeep.model.hf_cache import AdaptedCache, OwnedLayer, key_shape, trained_window
from kvkeep.model.hf_layers import Watched, has_read
from kvkeep.model.rope import rotations
from kvkeep.storage.offload.disk import Spill
from kvkeep.storage.offload.host import Purse
from kvkeep.storage.ragged import LayerCache, Paused


class Cache(AdaptedCache):
    """Pass as `past_key_values` to a model's forward or generate."""

    def __init__(
        self,
        model: Any,
        method: str | Method = "kvkeep",
        budget: int | float | None = None,
        *,
        schedule: str | int | Schedule | None = None,
        host_limit: int | None = None,
        disk: str | Path | None = None,
        storage: str | None = None,
        **parameters: Any,
    ):
        """host_limit: bytes that tokens put away may take; disk: a folder for what exceeds them.

        storage: "int8" or "int4", bits a number takes once its 32 tokens are complete; None: the model's. Tokens are
        packed once, and once more whenever a contest has given them other neighbours.
        """
        self.method = parse(method, **parameters)
        if schedule is not None:
            self.method = replace(self.method, schedule=as_schedule(schedule))
        self.budget = self.method.check(budget)
        super().__init__(model)
        self.storage, self.bits = storage, self.method.bits(storage)
        if self.bits == 4 and (size := key_shape(self.model)[1]) % 2:
            raise BadParameter(f"storage='int4' halves keys, but those of {self.name} have {size} numbers; use 'int8'.")
        moves = self.method.place or (self.method.recall and self.method.recall.moves)
        self.rotations = rotations(self.model, self.owned) if moves else {}
        self.purse = Purse(host_limit, Spill(disk) if disk is not None else None)
        self.window = trained_window(self.model)
        self._clear()

    def _clear(self) -> None:
        self.store = {i: LayerCache(self.bits) for i in self.owned}
        self.arrivals = Arrivals(partial(self.method.tokens, self.budget), self.method.schedule)
        self.arrival: Arrival | None = None  # the real tokens of the forward pass under way
        self.watch = Watch(self.name)
        self.peak = 0  # the most bytes of keys and values at once, as far as it was looked
        self.observer = Observer(self.method, self.owned, decoding=self.method.schedule.every is not None)
        self.stepper = Stepper(self.method, self.budget, self.rotations, self.window)
        # in a forward pass: the layers it went through and their state before it, None if it cannot be had back
        self.underway: dict[int, Paused | None] | None = None
        self.contest = Contest(self.method, self.budget, self.store, self.rotations, self.window)
        self.recaller = (
            Recaller(self.method, self.budget, self.rotations, self.owned, self.purse) if self.method.recall else None
        )

    @property
    def seen(self) -> int:
        return self.arrivals.columns

    def attend(self, index: int, new: Handover) -> tuple[Tensor, Tensor | None]:
        """All that happens in one layer of one forward pass: append, attend, evict."""
        if index == self.owned[0]:
            self._arrive(new)
        arrival = self.arrival.to(new.key.device)
        layer = self.store[index]
        self.underway[index] = layer.pause()
        if self.recaller:
            result = self.recaller.attend(index, new, arrival)
            self.watch.check(index, new, arrival, layer)
        elif self.arrivals.closed:
            result = new.outcome(self._over_cache(layer, new, arrival))
            self.watch.check(index, new, arrival, layer)
        elif self.stepper.can_swap(layer, arrival):
            result = new.outcome(self.stepper.swap(index, layer, new))
        elif self.stepper.can_grow(layer, arrival):
            result = new.outcome(self.stepper.grow(index, layer, new, arrival))
        else:
            result, sums = self._attended(layer, new, arrival)
            self.watch.check(index, new, arrival, layer)
            self._compete(index, new, arrival, layer, sums)
        layer.rest()
        if index == self.owned[-1]:
            self._leave(new)
        return result

    def _attended(
        self, layer: LayerCache, new: Handover, arrival: Arrival
    ) -> tuple[tuple[Tensor, Tensor | None], Tensor | None]:
        """The outcome of attention, and each query's log-sum-exp where it came for nothing and somebody wants it."""
        if layer:
            return new.outcome(self._over_cache(layer, new, arrival)), None
        found = with_sums(new) if self.method.memory and self.method.memory.sees_all else None
        return found or (new.stock(), None)

    @torch.no_grad()  # what is kept carries no graph; with learned sinks, scores would
    def _compete(self, index: int, new: Handover, arrival: Arrival, layer: LayerCache, sums: Tensor | None) -> None:
        """Let the tokens of rows that are due compete; bring what is noted of the others up to date."""
        if not layer or any(arrival.due) or self.method.memory:
            self.underway[index] = None  # what a contest drops does not come back
            rows = self.observer.look(index, new, arrival, self.arrivals.seen, layer, sums)
            self.watch.numbers(row.tokens.keys for row in rows)
            whole = self.contest.enter(index, rows)
            self.peak = max(self.peak, self.nbytes + whole)
        else:
            self.observer.note_step(index, new.query, arrival)

    def begin(self) -> None:
        self._undo()
        self.underway = {}
        for layer in self.stock_layers:
            if isinstance(layer, Watched):
                layer.ran = False

    def check_ready(self, layer: OwnedLayer) -> None:
        super().check_ready(layer)
        if self.underway is None:  # somebody else made the mask
            self.underway = {}

    def _arrive(self, new: Handover) -> None:
        """The first layer of ours: see which of the new tokens are real."""
        if self.underway:  # of a pass through another cache, which this one was part of
            self._undo()
        rows, _, q, _ = new.query.shape
        self.arrival = self.arrivals.next(rows, q, new.padding, new.key.device)
        self.observer.begin(self.arrival.counts)
        if self.arrival.is_step:
            self.stepper.begin(self.arrival, self.arrivals.seen)
        if self.recaller:
            self.recaller.begin()
        self.underway = {}

    def _undo(self) -> None:
        """Take back what a forward pass that did not end has done, if there was one, or say that it cannot be."""
        began = self.underway or {}
        whole = all(has_read(layer, self.seen, self.underway is None) for layer in self.stock_layers)
        if not whole or (self.seen and None in began.values()):
            raise CacheMisuse(
                "an earlier forward pass was cut short and left this cache unusable; reset() it or make a new one."
            )
        if began and not self.seen:
            return self.reset()
        for index, state in began.items():
            if self.store[index]:
                self.store[index].resume(state)
        self.observer.forget_step()
        self.stepper.forget()
        self.contest.forget()
        self.underway = None

    def _over_cache(self, layer: LayerCache, new: Handover, arrival: Arrival) -> Tensor:
        layer.append(new.key.detach(), new.value.detach(), arrival.positions, arrival.columns)
        if layer.rests:
            return layer.coded.attend(new.query, new.scale, new.softcap, new.sinks)
        output = attend(
            arrival.pack(new.query), layer.flat.keys, layer.flat.values, layer.segments, arrival.counts,
            new.scale, new.softcap, new.sinks,
        )  # fmt: skip
        return arrival.unpack(output)

    def _leave(self, new: Handover) -> None:
        """The forward pass went through all layers: its tokens count."""
        try:
            self.watch.settle()
        except KvkeepError:
            if not self.seen:
                self.reset()
            raise
        self.stepper.finish()
        if self.recaller:
            self.recaller.finish()
            self.peak = max(self.peak, self.nbytes)
        self.arrivals.settle(self.arrival, new.query.shape[2], new.padding)
        self.observer.noted.clear()
        self.underway = self.arrival = None
        self.contest.forget()

    def reset(self) -> None:
        """Forget everything, as if new."""
        self.layers = self.fresh_layers()
        self._clear()

    def kept(self, layer: int) -> list[list[list[int]]]:
        """Where the kept tokens stood in the text: [row][key head] -> ascending positions, padding not counted."""
        if layer not in self.store:
            raise CacheMisuse(f"layer {layer} is not compressed; the compressed ones are {self.owned}.")
        if self.recaller:
            return [shelf.positions() for shelf in self.recaller.shelves.get(layer, [])]
        return [[head.tolist() for head in row] for row in self.store[layer].positions()]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of the compressed layers, measured on their storages, with steps and zeros."""
        if self.recaller:
            return sum(shelf.nbytes for rows in self.recaller.shelves.values() for shelf in rows)
        return sum(layer.nbytes for layer in self.store.values())

    def report(self) -> Report:
        """What is held, and what a full cache would hold."""
        who = self.method.name, self.budget, self.arrivals.seen
        if self.recaller:
            found = Report.recalled(*who, self.recaller.shelves, self.peak)
        else:
            found = Report.of(*who, [self.store[i] for i in self.owned], self.observer.nbytes, self.peak)
        layers = [self._positions(i) for i in self.owned] if self.arrivals.has_parts else []
        return replace(found, kept=by_part(self.arrivals.parts, found.kept_per_head, layers))

    def _positions(self, layer: int) -> list[list[Tensor]]:
        """Where the tokens a layer attends to stood: [row][key head] -> [n]"""
        if self.recaller:
            return [[torch.tensor(head) for head in row] for row in self.kept(layer)]
        return self.store[layer].positions()

    def __repr__(self) -> str:
        report, name = self.report(), type(self).__name__
        held = f"{sum(self.arrivals.seen):,} tokens seen, {told(report.kept)} kept per key head, {human(report.bytes)}"
        away = f", {human(report.host_bytes)} offloaded" if report.host_bytes else ""
        return f"<kvkeep.{name} {self.method.name}, budget {self.budget}: {held}{away}>"

    def fork(self) -> Cache:
        """An independent copy: one compressed context, many questions."""
        self._undo()
        twin = type(self)(self.model, self.method, self.budget, storage=self.storage)
        twin.copy_stock(self)
        twin.store.update({i: layer.copy() for i, layer in self.store.items()})
        self.observer.gather()
        twin.observer.voters = {who: queries.clone() for who, queries in self.observer.voters.items()}
        if self.recaller:
            twin.pay_from(self.purse)  # what both hold is paid for once
            twin.recaller.shelves = {i: list(rows) for i, rows in self.recaller.shelves.items()}
            twin.recaller.marks, twin.recaller.question = list(self.recaller.marks), dict(self.recaller.question)
        twin.peak = self.peak
        twin.arrivals, twin.watch.checked = copy.copy(self.arrivals), set(self.watch.checked)
        return twin

    def pay_from(self, purse: Purse) -> None:
        """Share what the host may hold with other caches."""
        self.purse = purse
        if self.recaller:
            self.recaller.purse = purse

    def __deepcopy__(self, memo: dict) -> Cache:
        return self.fork()

    def __reduce__(self) -> Any:
        raise CacheMisuse(
            "a cache cannot be pickled: it would drag the model along; use save(path) and Cache.load(path, model)."
        )

    def save(self, path: str | Path) -> None:
        """Write this cache to a folder; the model is not part of it."""
        serialize.save(self, path)

    @classmethod
    def load(cls, path: str | Path, model: Any) -> Cache:
        """Read a cache that was saved with the same model."""
        return serialize.load(cls, path, model)

    def _take(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, repeats allowed."""
        if not self.arrivals.seen:
            return
        for layer in self.store.values():
            if layer:
                layer.take(rows)
        self.observer.take(rows)
        if self.recaller:
            self.recaller.take(rows)
        self.arrivals.take(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._stock("reorder_cache", beam_idx)
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self._stock("batch_select_indices", indices)
        self._take(torch.arange(len(self.arrivals.seen))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._stock("batch_repeat_interleave", repeats)
        self._take([row for row in range(len(self.arrivals.seen)) for _ in range(repeats)])

    def _stock(self, name: str, argument: Any) -> None:
        self._undo()
        for layer in self.stock_layers:
            getattr(layer, name)(argument)

    def activate_past_recording(self) -> None:
        """transformers calls this before assisted generation reads anything, so that it can crop later."""
        raise CacheMisuse(
            "assisted generation and prompt lookup (assistant_model=, prompt_lookup_num_tokens=) take back tokens that "
            "were guessed wrongly, and a compressed cache cannot give back what it dropped for them; leave them out."
        )

    def crop(self, *_: Any, **__: Any) -> None:
        raise CacheMisuse(
            "a compressed cache cannot be cropped: dropped tokens do not come back; fork() it before you add."
        )
