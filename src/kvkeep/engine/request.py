"""A request: one prompt, how its answer is sampled, and the answer so far."""

from __future__ import annotations

import reprlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvkeep.engine.detokenizer import Answer, IncrementalDetokenizer
from kvkeep.engine.progress import Progress
from kvkeep.engine.sampling import Generation
from kvkeep.engine.sequence import ProgressCallback, Sequence, SequenceConfig
from kvkeep.errors import BadInput, BadParameter
from kvkeep.storage.offload.malloc_trim import trim
from kvkeep.types import Budget


@dataclass(eq=False)
class Request:
    """Scheduled from `submit` until it is done: answered, failed or cancelled."""

    config: SequenceConfig
    ids: Tensor  # [n] the prompt; what the sequence has seen already is not prefilled again
    how: Generation = field(default_factory=Generation)
    continues: Sequence | None = None  # a sequence that has seen the beginning of the prompt
    question: str | None = None  # for methods that retrieve with it, before the prefill
    progress: ProgressCallback = None
    interactive: bool = False  # somebody reads the answer while it is decoded: long prompts must not hold it up
    prefill_only: bool = False  # without an answer
    keeps_cache: bool = False  # the sequence's cache holds the answer, too, when the request is done
    banned_first: tuple[int, ...] = ()  # tokens the answer must not begin with
    logits: Tensor | None = None  # after the prompt, if the sequence has seen it to the end [vocabulary]

    def __post_init__(self) -> None:
        self._sequence = self.continues
        self.deltas: deque[str] = deque()  # text to be streamed
        self.started = self.done = self.cancelled = False
        self.packs = True  # its prompt may be prefilled together with others
        self.error: BaseException | None = None  # why there is no answer, or only part of one
        self.selection = ""  # "exact": as of a prompt prefilled at once; "running": evicted after every chunk
        self.created_s = time.perf_counter()
        self.first_token_s = self.done_s = 0.0  # after it was created
        self.streamed = 0  # characters of the answer in deltas so far
        self.notify: Callable[[], None] = lambda: None  # called after new text, and when the request is done
        self._begin_answer()

    def _begin_answer(self) -> None:
        self.answer = Answer(IncrementalDetokenizer(self.config.tokenizer), len(self.ids))
        self.steps = 0  # decode steps so far: tokens of the answer that went through the model

    @property
    def text(self) -> str:
        return self.answer.text

    @property
    def sequence(self) -> Sequence:
        assert self._sequence is not None, "the request is not started, or done"
        return self._sequence

    def drop_sequence(self) -> None:
        """Free its cache, if nobody wants it."""
        if not self.keeps_cache:
            self._sequence = self.continues = None

    def start(self) -> None:
        """Before the first chunk: a sequence, with the question's queries captured."""
        sequence = self.continues or self.config.new_sequence()
        if self.question is not None:
            sequence.set_question(self.question, len(self.ids))
        self._sequence, self.started = sequence, True
        self._prefill_began, self._prefill_start = time.perf_counter(), len(sequence.token_ids)
        at_once = sequence.defer_eviction(len(self.ids)) or len(sequence.next_chunk(self.ids)) == self._to_prefill
        if self.config.method.scorer is not None:
            self.selection = "exact" if at_once else "running"

    @property
    def _to_prefill(self) -> int:
        return len(self.ids) - self._prefill_start

    @property
    def is_prefilled(self) -> bool:
        return len(self.sequence.token_ids) == len(self.ids)

    def ends_with(self, chunk: Tensor) -> bool:
        """Whether this chunk, the next one, is the last of the prompt."""
        return len(self.sequence.token_ids) + len(chunk) == len(self.ids)

    @property
    def can_settle_later(self) -> bool:
        """Whether another prompt's pass may be launched before the one that ends this prompt is done."""
        method = self.config.method
        return not (self.interactive or self.prefill_only or method.retrieval or method.needs_passes)

    def report_progress(self) -> None:
        """After a chunk."""
        if self.config.method.retrieval:
            trim()
        if self.progress:
            done = len(self.sequence.token_ids) - self._prefill_start
            self.progress(Progress(done, self._to_prefill, time.perf_counter() - self._prefill_began))

    @property
    def expected_tokens(self) -> int:
        """Per key head, prompt and answer: about so many will be kept."""
        new, tokens = self.how.max_new_tokens, len(self.ids)
        if self.continues and self.continues.cache.tracker.frozen:
            return self.continues.cache.longest_head + tokens - len(self.continues.token_ids) + new
        method, budget = self.config.method, self.config.budget
        kept = tokens if method.scorer is None else Budget(method.check(budget)).tokens(tokens)
        return min(tokens, kept) + new

    def restart(self) -> None:
        """Drop the answer so far; text that was streamed is not streamed again."""
        self._begin_answer()
        self.started = False
        self._sequence = self.continues

    def add(self, token: int, eos_token_ids: set[int]) -> None:
        """The next token of the answer."""
        self.first_token_s = self.first_token_s or time.perf_counter() - self.created_s
        answer, stop = self.answer.detokenizer, self.how.stop
        if token not in eos_token_ids:
            answer.add(token)
        ends = token in eos_token_ids or len(answer.ids) >= self.how.max_new_tokens
        if ends:
            answer.finish()
        if any(text in answer.text.lstrip() for text in stop):
            answer.cut(stop)
            ends = True
        ready = len(answer.text) if ends else answer.held_from(stop)
        if ready > self.streamed:
            self.deltas.append(answer.text[self.streamed : ready])
            self.streamed = ready
            self._notify()
        if ends:  # last: another thread takes a request that is done for complete
            self.finish()

    def finish(self, error: BaseException | None = None) -> None:
        self.drop_sequence()
        self.error, self.done = error, True
        self.done_s = time.perf_counter() - self.created_s
        self._notify()

    def _notify(self) -> None:
        try:
            self.notify()
        except Exception:  # nobody listens any more
            self.cancelled = True


def check_prompts(prompts: Any) -> list[str]:
    """Refuse what is not a list of texts."""
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise BadParameter(f"prompt={reprlib.repr(prompts)} is a {kind}; give a text, or a list of texts.")
    found = list(prompts)
    for number, each in enumerate(found):
        if not isinstance(each, str):
            raise BadParameter(f"prompt {number} of {len(found)} is {reprlib.repr(each)}; give a list of texts.")
    return found


def too_long(request: Request) -> BaseException | None:
    try:
        request.config.check_length(len(request.ids), request.how.max_new_tokens)
    except BadInput as error:
        return error
    return None


def raise_numbered(errors: Iterable[BaseException | None]) -> None:
    """One error that names every prompt that has one."""
    found = [f"prompt {number}: {str(error).splitlines()[0]}" for number, error in enumerate(errors) if error]
    if found:
        raise BadInput("; ".join(found))
