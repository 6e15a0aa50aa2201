"""A text prefilled once, and any number of questions about it: `Engine.read`.

With a history, the whole text stays on the host. Every question attends to all of it, and the method selects from text
and question what the answer needs. Without one, the text is compressed before any question is known, as in the
query-agnostic protocol of `kvkeep eval`; a question is asked on a fork of that cache, and nothing of it or its answer
is evicted.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvkeep.arguments import check_value
from kvkeep.cache import serialize
from kvkeep.cache.cache import Cache
from kvkeep.cache.eviction import EvictingBackend
from kvkeep.cache.report import Report
from kvkeep.engine.detokenizer import Answer
from kvkeep.engine.driver import Driver, Handle
from kvkeep.engine.exact import exact_config
from kvkeep.engine.history_store import sequence_after
from kvkeep.engine.progress import ProgressCallback, ProgressOption, watch
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Generation
from kvkeep.engine.sequence import Sequence, SequenceConfig
from kvkeep.errors import BadCacheFile, CacheMisuse, QueryAwareWarning
from kvkeep.model.chat import check_text
from kvkeep.storage.history import History


class Context:
    """A text that is prefilled. Made by `Engine.read` and `Engine.load_context`."""

    def __init__(self, driver: Driver, sequence: Sequence, text: str, known_questions: frozenset[str] = frozenset()):
        """sequence: one of its own, with the text prefilled; known_questions: those that took part in the selection"""
        if sequence.history is None:
            sequence.cache.tracker.mark_context()
        else:
            sequence.drop_queries()
        self._driver, self.text = driver, text
        self.sequence = sequence  # others than this context must not change it
        self.known_questions, self._warned = known_questions, False
        self.answer = Answer(sequence.config.tokenizer)  # to the last question
        self._report = sequence.cache.report()

    @classmethod
    def read(
        cls,
        driver: Driver,
        config: SequenceConfig,
        text: str,
        question: str | None,
        progress: ProgressOption,
        begin: Callable[[], Sequence] | None = None,
    ) -> Context:
        """Prefill a text. begin: makes a sequence with a history, which may have seen a beginning of the text

        question: without a history it takes part in the selection, and is removed again
        """
        sequence = config.new_sequence()
        check_text("text", text)
        ids, rest = sequence.config.context_ids(text), []
        sequence.config.check_length(len(ids), 1)
        if question is not None:
            check_text("question", question)
        if question is not None and begin is None:
            sequence.set_question(question, len(ids))
            if sequence.config.method.query_aware:
                if sequence.cache.hf_layers:  # which cannot return to an earlier state
                    raise CacheMisuse(
                        f"{sequence.cache.name} has layers that cannot remove a question again; use "
                        "engine.generate(text, question=…)."
                    )
                rest = sequence.config.question_ids(text, question, ids)
        whole = config, torch.tensor(ids + rest), Generation(1), sequence if begin is None else None
        request = Request(*whole, find_stored=begin, prefill_only=True, keeps_cache=True)
        with watch(progress, len(request.ids)) as report:
            request.progress = report
            driver.prefill(request)
        sequence = request.sequence
        if rest:
            _rewind(sequence.cache, len(ids))
        sequence.token_ids = ids
        return cls(driver, sequence, text, frozenset({question.strip()} if question else ()))

    def ask(self, question: str, **options: Any) -> str:
        """The answer to a question about the text; options as in `Engine.stream`."""
        return "".join(self.stream(question, **options))

    def stream(self, question: str, *, progress: ProgressOption = None, **options: Any) -> Iterator[str]:
        """The same, detokenized incrementally."""
        check_value("progress", progress, Callable | bool | None)
        how = Generation.of(options)
        return self._stream(question, self._prompt(question, how), how, progress)

    def submit(self, question: str, *, progress: ProgressCallback = None, **options: Any) -> Handle:
        """The same, as a handle, whose `cache` holds text, question and answer when that is complete."""
        check_value("progress", progress, Callable | None)
        how = Generation.of(options)
        return self._submit(question, self._prompt(question, how), how, progress)

    def _prompt(self, question: str, how: Generation) -> Tensor:
        """Ids of the text and a question that both fit the model."""
        check_text("question", question)
        self._config_to_answer(how)
        seen = self.sequence.token_ids
        ids = seen + self.sequence.config.question_ids(self.text, question, seen)
        self.sequence.config.check_length(len(ids), how.max_new_tokens)
        self._warn(question)
        return torch.tensor(ids)

    def _config_to_answer(self, how: Generation) -> SequenceConfig:
        config, known = self.sequence.config, self.sequence.history
        return exact_config(config, known.pool if known else None) if how.exact else config

    def _submit(self, question: str, ids: Tensor, how: Generation, progress: ProgressCallback) -> Handle:
        with self._driver.lock:
            sequence = self._continued(ids, how)
            sequence.set_question(question, self.tokens)
        request = Request(sequence.config, ids, how, sequence, progress=progress, interactive=True, keeps_cache=True)
        return Handle(self._driver.submit(request), self._driver)

    def _continued(self, ids: Tensor, how: Generation) -> Sequence:
        """A sequence that goes on after the text. ids: of text and question"""
        if (known := self.sequence.history) is None:
            return self.sequence.fork()
        continued = sequence_after(known, self._config_to_answer(how), ids, self.tokens)
        assert (history := continued.history) is not None
        history.makes_blocks = False  # nobody goes on after a question
        return continued

    def _stream(self, question: str, ids: Tensor, how: Generation, progress: ProgressOption) -> Iterator[str]:
        with watch(progress, len(ids) - self.tokens) as report:
            handle = self._submit(question, ids, how, report)
            try:
                yield from handle
            finally:
                self.answer, self._report = handle.request.answer, handle.cache.report()

    def _warn(self, question: str) -> None:
        """Warn once, where tokens were evicted without knowing this question."""
        if self.sequence.history is not None:
            return
        method, kept = self.sequence.config.method, self._report.kept["context"]
        if self._warned or not method.query_aware or kept >= self.tokens or question.strip() in self.known_questions:
            return
        self._warned = True
        warnings.warn(
            f"'{method.name}' kept {kept:,.0f} of {self.tokens:,} tokens before it knew this question, by the last "
            "queries of the text; what is asked for may be evicted. Give a question that is known to engine.read(text, "
            "question=…), or use 'kvkeep_context', or a method that evicts nothing, such as 'tokenselect'.",
            QueryAwareWarning, stacklevel=5,
        )  # fmt: skip

    def fork(self) -> Context:
        """An independent copy."""
        fork = copy.copy(self)
        fork.sequence = self.sequence if self.sequence.history else self.sequence.fork()
        return fork

    def save(self, path: str | Path) -> None:
        """Save it to a folder; model and tokenizer are not part of it."""
        facts = {"text": self.text, "ids": self.sequence.token_ids, "questions": sorted(self.known_questions)}
        serialize.save_context(self.sequence.cache, self.sequence.history, path, facts)

    @classmethod
    def load(cls, driver: Driver, config: SequenceConfig, path: str | Path, empty: Callable[[int], History]) -> Context:
        """empty: a history for so many tokens"""
        cache, found, history = serialize.load_context(Cache, path, config.model, empty)
        if config.context_ids(found["text"]) != found["ids"]:
            raise BadCacheFile(
                f"{path} was saved with another tokenizer or chat template, or special tokens; load it with that one."
            )
        sequence = config.sequence_of(cache, found["ids"] if history is None else [])
        if history is not None:
            sequence.continue_from(history, found["ids"], 0)
        return cls(driver, sequence, found["text"], frozenset(found["questions"]))

    def __len__(self) -> int:
        """Tokens of the text, with the chat template's beginning."""
        return len(self.sequence.token_ids)

    tokens = property(__len__)

    def report(self) -> Report:
        """What the cache holds of the text; after a question, what its fork held of text, question and answer."""
        return self._report

    def __repr__(self) -> str:
        return repr(self.sequence.cache).replace("kvkeep.Cache", "kvkeep.Context", 1)


def _rewind(cache: Cache, end: int) -> None:
    """Remove the tokens from position `end` on; what was evicted for them stays evicted."""
    backend, tracker = cast(EvictingBackend, cache.backend), cache.tracker
    for layer in backend.store.values():
        layer.fill([[head[: int((head.token_positions < end).sum())] for head in layer.row(0)]])
    tracker.seen, tracker.prompt, tracker.padded_length = [end], [end], end
    tracker.kept = [min(tracker.kept[0], end)]
    backend.query_buffer.queries.clear()
